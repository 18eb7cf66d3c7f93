"""The backward of a scalar, without what torch looks up for every other: to the bit.

Before torch runs the backward of one loss, it takes the host six microseconds to find that the
gradient to begin with is 1. Knows one function of torch; no optimizer, block or scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.overrides import has_torch_function_unary

from amp_patch.casting.mode import FLOATS
from amp_patch.casting.torch_compile import never_trace

#: What `torch.autograd.backward` calls in the end; None: this version of torch calls another.
_run: Callable[..., Any] | None = getattr(graph, "_engine_run_backward", None)
_are_transforms_active = torch._C._are_functorch_transforms_active


def short_for_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.backward` with a short way for the loss of a training step.

    Args:
        original: serves all other calls. One that is not torch's own is returned as it is.
    """
    run = _run
    if run is None or not _is_of_torch_autograd(original):
        return original

    @never_trace
    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_plain = grad_tensors is None and not args and (not kwargs or kwargs == _NO_INPUTS)
        if not (is_plain and _is_scalar(tensors)):
            return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
        return run(
            (tensors,),
            (torch.ones_like(tensors, memory_format=torch.preserve_format),),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    return backward


#: What `Tensor.backward` gives by name.
_NO_INPUTS = {"inputs": None}


def _is_of_torch_autograd(function: Any) -> bool:
    if type(function) is not FunctionType:
        return False
    # A function that somebody has made of text may be nowhere, as those of unittest.mock are.
    return function.__globals__.get("__name__") == "torch.autograd"


def _is_scalar(value: Any) -> bool:
    """Return whether this is a real 0-dim tensor, and no class, mode or transform has a say."""
    return (
        isinstance(value, Tensor)
        and not has_torch_function_unary(value)  # else a class of the user's would see the rest
        and value.dim() == 0
        and value.dtype in FLOATS
        and not _are_transforms_active()
    )
