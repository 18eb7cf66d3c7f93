"""Half weights that one backward reaches hundreds of times, as a cell's does (O2, O3, O5).

Autograd adds up in half what comes back to a weight: of 1,024 calls of a cell in bfloat16 half of
the gradient is lost, under torch's autocast as well. So uses are counted, and further ones take a
`part` of the weight: the same numbers at another place in the graph. What comes back to one part is
added up in half, what comes back to all of them in float32. Knows tensors and their uses; nothing
of functions, rules or modes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import FunctionCtx
from torch.nn import Module, Parameter

from amp_patch.common.weak_modules import ModuleTable
from amp_patch.levels import HALVES

from .shared_casts import USES, is_in_selective_checkpoint, is_recorded

#: Of so few uses no weight needs parts.
_FEW = min(USES.values())


class _Parts:
    """Parts of one weight, one after the other.

    Keeps the weight alive, by the graph, so that no other one gets its id.

    Attributes:
        place: where what comes back to them is added up.
        latest: the part that is used now.
        left: how often it may still be used.
        pointer: the weight's address, which ``weight.data = t`` changes.
    """

    def __init__(self, weight: Tensor) -> None:
        self.place = _Place.apply(weight)
        self.pointer = weight.data_ptr()
        self.renew(weight)

    def renew(self, weight: Tensor) -> None:
        """Begin a new part."""
        self.latest = _Part.apply(self.place, (weight,))
        self.left = USES[weight.dtype]


# Threads share what follows: what they count for each other makes no gradient wrong.
#: id of a weight -> how often it was used itself.
_counts: dict[int, int] = {}
#: id of a weight -> its uses in parts.
_further: dict[int, int] = {}
#: ids of weights that had so many uses the last time that all of these are in parts now. Else the
#: first ones, which come back last, would be added in half to the sum of all others.
_loops: set[int] = set()
#: id of a weight -> its parts.
_parts: dict[int, _Parts] = {}
#: model -> what forgets its weights with it.
_ends: ModuleTable[weakref.finalize[..., Module]] = ModuleTable()


def begin_anew() -> None:
    """A backward, or a step, is over: what is used from now on comes back by another one."""
    _counts.clear()
    if _further:
        for key, count in [*_further.items()]:
            if key not in _loops:
                _loops.add(key)
            elif count <= _FEW:
                _loops.discard(key)
        _further.clear()
        _parts.clear()
    if _loops:
        _counts.update(dict.fromkeys(_loops, sys.maxsize))


def forget() -> None:
    """Forget all weights: another one may get the id of one that is gone."""
    _loops.clear()
    _further.clear()
    _parts.clear()
    _counts.clear()
    for model in [*_ends]:
        _ends.pop(model).detach()


def forget_with(model: Module, weights: Iterable[Tensor]) -> None:
    """Forget weights when a model goes: parts keep them until a backward, which may never come.

    Only these: not those that an earlier call told for the same model.
    """
    if model in _ends:
        _ends.pop(model).detach()
    _ends[model] = weakref.finalize(model, _forget_these, list(map(id, weights)))


def _forget_these(keys: Iterable[int]) -> None:
    for key in keys:
        _loops.discard(key)
        for table in (_counts, _further, _parts):
            table.pop(key, None)


def is_used_up(weight: Tensor) -> bool:
    """Count one use more of a weight, and return whether it must be of a `part`."""
    key = id(weight)
    count = _counts.get(key, 0)
    if count < _FEW or count < USES.get(weight.dtype, sys.maxsize):
        _counts[key] = count + 1
        return False
    if not torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return False
    if is_recorded() or is_in_selective_checkpoint():
        return False
    _further[key] = _further.get(key, 0) + 1
    return True


def used(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Count one use more of a function's first weight, and return what it is to be called with."""
    weight = _first_weight(args)
    if weight is None and kwargs:
        weight = _first_weight(kwargs.values())
    if weight is None:
        for one in args:
            if type(one) is list and weight is None:  # those of a recurrent layer
                weight = _first_weight(one)
    return in_parts(args, kwargs) if weight is not None and is_used_up(weight) else (args, kwargs)


def _first_weight(values: Iterable[Any]) -> Parameter | None:
    for value in values:  # a generator would take a call for each of a function's uses
        if type(value) is Parameter:
            return value
    return None


def in_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return a function's arguments, of which a weight `is_used_up`, with a `part` for each."""
    return tuple(map(_parts_of, args)), {name: part(value) for name, value in kwargs.items()}


def _parts_of(value: Any) -> Any:
    return list(map(part, value)) if type(value) is list else part(value)


def part(value: Any) -> Any:
    """Return what a half weight is used as where it `is_used_up`; any other value as it is."""
    parts = _parts.get(id(value))
    if parts is None or parts.pointer != value.data_ptr():
        if type(value) is not Parameter or value.dtype not in HALVES or not value.requires_grad:
            return value
        parts = _parts[id(value)] = _Parts(value)
    elif not value.requires_grad:
        return value
    elif parts.left < 1:
        parts.renew(value)
    parts.left -= 1
    return parts.latest


class _Context(FunctionCtx):
    """What the backward of `_Place` gets of its forward."""

    dtype: torch.dtype
    key: int


class _Place(Function):
    """Where gradients of parts are added up in float32; has no numbers and takes no memory."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor) -> Tensor:
        ctx.dtype, ctx.key = weight.dtype, id(weight)
        return torch.zeros((), device=weight.device, dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        # `torch.autograd.grad` begins nothing anew, and the weight may be of one task alone
        _parts.pop(ctx.key, None)
        return grad.to(ctx.dtype)


class _Part(Function):
    """A weight, with its memory and version, derived by way of a `_Place`."""

    @staticmethod
    def forward(ctx: FunctionCtx, place: Tensor, weight: tuple[Tensor]) -> Tensor:
        return weight[0].detach()  # in a tuple, as torch would make a view of an argument

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        return grad.float(), None
