"""``torch.lerp`` of float32 and half tensors, where torch takes one dtype.

Knows which argument rules: an average in fp32, into which half weights are mixed, or a half
activation, which meets float32 tensors that forward makes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from amp_patch.casting import Function
from amp_patch.casting.meeting_dtypes import casting_where_they_meet
from amp_patch.casting.mode import mode
from amp_patch.levels import HALVES
from amp_patch.patching import stand_for

from .call_arguments import Kwargs


def mixing(function: Function) -> Function:
    """Return ``torch.lerp``, or the method, that takes float32 tensors beside half ones.

    Args:
        function: torch's.

    Returns:
        One that mixes in float32. So is the result, but for a half activation in the forward of a
        model that is stored in half, which is handed on in half. The weight in half may come first,
        in ``mean.copy_(weight.lerp(mean, 0.999))``.
    """
    meeting = casting_where_they_meet(function, "joined")

    @functools.wraps(function)
    def lerp(input: Tensor, end: Tensor, weight: Any = None, **kwargs: Any) -> Any:
        if mode.stored is not None and input.dtype in HALVES and weight is not None:
            return meeting(input, end, weight, **kwargs)
        if end.dtype is not input.dtype and weight is not None:
            input, end = widened(end, input), widened(input, end)
        return mixed(function, input, end, weight, kwargs)

    return stand_for(lerp, function)


def mixed(function: Function, input: Tensor, end: Tensor, weight: Any, kwargs: Kwargs) -> Any:
    """Call torch's function of an average, what is mixed in, and perhaps a weight in half."""
    if weight is None:  # which torch refuses
        return function(input, end, **kwargs)
    if isinstance(weight, Tensor):
        weight = widened(input, weight)
    # Some optimizers call it for each parameter: to hand on no dict takes a tenth less.
    return function(input, end, weight, **kwargs) if kwargs else function(input, end, weight)


def widened(mean: Tensor, weight: Tensor) -> Tensor:
    """Return the weight in the dtype of its average, where that is float32 and the weight half."""
    return weight.float() if mean.dtype is torch.float32 and weight.dtype in HALVES else weight
