"""Hooks that a script registers on masters for the backward, which comes to their half parameters.

Those of `torch.Tensor.register_hook` go there in `hooks`; here are torch's others. What they get is
in the dtype of the master. Knows no scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.casting.torch_compile import never_trace
from amp_patch.levels import HALVES

from .master_inputs import EdgeOfMaster

_ParamOf = Callable[[Tensor], Tensor]


def replacements(param_of: _ParamOf) -> dict[str, Callable[[Any], Any]]:
    """Return, for each function by its path, what makes its replacement.

    Args:
        param_of: returns the half parameter of a master, and any other tensor itself.
    """
    return {
        "torch.autograd.graph.register_multi_grad_hook": functools.partial(_of_several, param_of),
        "torch.autograd.graph.get_gradient_edge": functools.partial(_edge, param_of),
    }


def _of_several(param_of: _ParamOf, original: Callable[..., Any]) -> Callable[..., Any]:
    @never_trace
    @functools.wraps(original)
    def register_multi_grad_hook(tensors: Iterable[Tensor], fn: Any, *, mode: str = "all") -> Any:
        given = list(tensors)
        reached = list(map(param_of, given))
        rows = enumerate(zip(given, reached, strict=True))
        masters = {place: one.dtype for place, (one, half) in rows if half is not one}
        if masters:
            fn = _widening_one(fn) if mode == "any" else _widening(fn, masters)
        return original(reached, fn, mode=mode)

    return register_multi_grad_hook


def _widening(fn: Callable[..., Any], dtypes: Mapping[int, torch.dtype]) -> Callable[..., Any]:
    """Return a hook of several gradients that gets some of them in other dtypes.

    Args:
        fn: the script's.
        dtypes: by the places of the gradients.
    """

    @functools.wraps(fn)
    def hook(grads: Sequence[Tensor | None]) -> Any:
        rows = enumerate(grads)
        return fn([g if g is None else g.to(dtypes.get(place, g.dtype)) for place, g in rows])

    return hook


def _widening_one(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of whichever gradient comes first, in float32."""

    @functools.wraps(fn)
    def hook(grad: Tensor) -> Any:
        return fn(grad.float() if grad.dtype in HALVES else grad)

    return hook


def _edge(param_of: _ParamOf, original: Callable[..., Any]) -> Callable[..., Any]:
    @never_trace
    @functools.wraps(original)
    def gradient_edge(tensor: Tensor) -> Any:
        half = param_of(tensor)
        edge = original(half)
        return edge if half is tensor else EdgeOfMaster.made(edge, tensor)

    return gradient_edge
