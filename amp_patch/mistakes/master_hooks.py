"""Hooks that a script registers on masters for the backward, which comes to their half parameters.

Those of `torch.Tensor.register_hook` go there in `hooks`; here are torch's others. What they get is
in the dtype of the master. Knows no scale.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from amp_patch.casting.mode import HALVES
from amp_patch.casting.torch_compile import never_trace
from amp_patch.patching import Patches

_ParamOf = Callable[[Tensor], Tensor]


def replacements(param_of: _ParamOf) -> dict[str, Callable[[Any], Any]]:
    """Return, for each function by its path, what makes its replacement.

    Args:
        param_of: returns the half parameter of a master, and any other tensor itself.
    """
    return {
        "torch.autograd.graph.register_multi_grad_hook": functools.partial(_of_several, param_of),
        "torch.autograd.graph.get_gradient_edge": functools.partial(_edge, param_of),
        "torch.Tensor.expand_as": functools.partial(_expansion, param_of),
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


class _HandedOn(OrderedDict[int, Callable[..., Any]]):
    """The hooks of a master's node, each of which its half parameter's node calls as well.

    Args:
        half: the half parameter.
    """

    def __init__(self, half: Tensor) -> None:
        super().__init__()
        self._node = get_gradient_edge(half).node  # the graph alone does not keep it
        self._handles: dict[int, Any] = {}

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        super().__setitem__(key, hook)
        self._handles[key] = self._node.register_hook(hook)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._handles.pop(key).remove()


def _edge(param_of: _ParamOf, original: Callable[..., Any]) -> Callable[..., Any]:
    @never_trace
    @functools.wraps(original)
    def gradient_edge(tensor: Tensor) -> Any:
        edge = original(tensor)
        _hand_on(edge.node, tensor, param_of(tensor))
        return edge

    return gradient_edge


def _expansion(param_of: _ParamOf, original: Callable[..., Any]) -> Callable[..., Any]:
    """Look for ``p.expand_as(p)``, whose graph gives reducers the node of a parameter."""

    @functools.wraps(original)
    def expand_as(self: Tensor, other: Tensor) -> Any:
        expanded = original(self, other)
        if self is other and expanded.grad_fn is not None and self.is_leaf:
            _hand_on(expanded.grad_fn.next_functions[0][0], self, param_of(self))
        return expanded

    return expand_as


@never_trace
def _hand_on(node: Any, master: Tensor, half: Tensor) -> None:
    """From now on hooks that are registered on a master's node are on its half parameter's, too."""
    if half is master or _KNOWN in node.metadata or not half.requires_grad:
        return
    node.metadata[_KNOWN] = True
    register = Function._register_hook

    def register_hook(hooks: Any, hook: Any) -> Any:
        return (hook, None) if isinstance(hook, _HandedOn) else register(hooks, hook)

    # torch has it make the dict that the node keeps its hooks in
    patches = Patches()
    patches.replace(Function, "_register_hook", staticmethod(register_hook))
    try:
        node.register_hook(_HandedOn(half))
    finally:
        patches.undo()


_KNOWN = "amp_patch hands on its hooks"
