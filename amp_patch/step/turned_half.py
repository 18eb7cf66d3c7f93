"""Weights that a script has turned to half at a level that trains them in float32.

A layer that finds its first weights from its first batch (the ActNorm of Glow) writes
``self.scale.data = -x.std(0).log()``: in the dtype of an activation, which is half at O1 and O4.
Knows parameters and their gradients alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from amp_patch.kernels.default_device import without_default_device
from amp_patch.kernels.getters import DTYPE
from amp_patch.levels import HALVES
from amp_patch.weights.parameter_lists import store_grad, stored_grad


@without_default_device
def turn_to_fp32(params: Sequence[Tensor]) -> None:
    """Store in float32 what has turned to half and is to be trained, with its gradient.

    In half the step would round small updates away, and in float16 Adam divides 0 by its ``eps``,
    which is 0 there: NaN. `amp.initialize` refuses half parameters that are to be trained at such a
    level, so those that there are have turned since.
    """
    if _HALVES.isdisjoint(map(DTYPE, params)):
        return
    for param in params:
        if param.dtype in _HALVES and param.requires_grad:
            grad = stored_grad(param)
            param.data = param.data.float()
            if grad is not None:
                store_grad(param, grad.float())


_HALVES = frozenset(HALVES)
