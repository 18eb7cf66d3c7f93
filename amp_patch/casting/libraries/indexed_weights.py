"""Rows of a half weight that a script takes itself, ``weight[ids]``, on a CPU (O2, O3, O5).

A CPU adds up in half what comes back to one row: of 6,000 nodes of three types half of the gradient
is lost in bfloat16. So what is taken by a tensor of indices comes back in float32 sums, rounded
once. What is taken of activations is left to torch, and so is all on a GPU. Knows parameters and
how they are indexed; nothing of functions, rules or modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import FunctionCtx
from torch.compiler import is_compiling
from torch.nn import Parameter

from amp_patch.casting.many_uses import is_used_up, part
from amp_patch.casting.mode import HALVES
from amp_patch.casting.shared_casts import is_recorded
from amp_patch.patching import Patches, stand_for, stood_for

from .lookups import FEW_OF_A_ROW, sums_of_rows

Index = tuple[Any, ...]

#: Parts of an index that say which rows, one by one; a bool mask takes none twice.
_INTEGERS = frozenset({torch.int64, torch.int32})
#: Of which kinds the parts of an index are that torch makes a view by.
_OF_VIEWS = frozenset({int, slice, type(None), type(...)})
_ALL = slice(None)


def install(patches: Patches, models: Iterable[nn.Module]) -> None:
    """Replace ``Parameter[...]`` where one of these models has parameters on a CPU.

    Not elsewhere, for Python counts a class with such a method among sequences: of a parameter of
    one element ``torch.tensor([param])`` has a dimension more meanwhile.
    """
    original = Parameter.__getitem__
    if stood_for(original) is None and any(
        param.is_cpu for model in models for param in model.parameters()
    ):
        patches.replace(Parameter, "__getitem__", taking_rows(original))


def taking_rows(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``Parameter.__getitem__`` with gradients added up in float32."""

    @functools.wraps(original)
    def wrapper(weight: Any, index: Any) -> Any:
        if type(index) in _OF_VIEWS or type(weight) is not Parameter or is_compiling():
            return original(weight, index)
        if weight.dtype not in HALVES or not _loses_in_half(weight):
            return original(weight, index)
        found = _parted(index if type(index) is tuple else (index,))
        if found is None:
            return original(weight, index)
        view, rows = found
        used: Any = part(weight) if is_used_up(weight) else weight
        if not _are_many(rows):
            return original(used, index)
        return _Rows.apply(original, original(used, view) if view else used, rows)

    return stand_for(wrapper, original)


def _loses_in_half(weight: Tensor) -> bool:
    if not (weight.is_cpu and weight.requires_grad and torch.is_grad_enabled()):
        return False
    return weight.layout is torch.strided and forward_ad._current_level < 0 and not is_recorded()


def _parted(index: Index) -> tuple[Index, Index] | None:
    """Return the view that an index is of, and how its rows are taken of that view.

    Returns:
        Two indices, which one after the other are the same as the one: all but tensors, which is
        empty where it is the whole weight; and tensors, ``slice(None)`` and ``...``. None where
        torch is to decide: nothing is taken by integers, or something by another kind of index.
    """
    view: list[Any] = []
    rows: list[Any] = []
    is_whole = True
    for one in index:
        if isinstance(one, Tensor) and one.dtype in _INTEGERS:
            if one.dim():
                view.append(_ALL)
                rows.append(one)
                continue
        elif type(one) not in _OF_VIEWS:
            return None
        view.append(one)
        is_whole = False
        if one is ...:
            rows.append(one)
        elif one is None or type(one) is slice:
            rows.append(_ALL)
    if not any(map(_is_tensor, rows)):
        return None
    return () if is_whole else tuple(view), tuple(rows)


def _are_many(rows: Index) -> bool:
    count = 1
    for one in rows:
        if _is_tensor(one):
            count *= one.numel()
    return count > FEW_OF_A_ROW


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _Context(FunctionCtx):
    """What the backward of `_Rows` gets of its forward."""

    shape: torch.Size
    rows: Index
    saved_tensors: tuple[Tensor, ...]


class _Rows(Function):
    """What is taken of a weight by tensors of indices."""

    @staticmethod
    def forward(
        ctx: _Context, original: Callable[[Any, Any], Any], weight: Tensor, rows: Index
    ) -> Any:
        ctx.save_for_backward(*filter(_is_tensor, rows))
        ctx.shape, ctx.rows = (
            weight.shape,
            tuple([None if _is_tensor(one) else one for one in rows]),
        )
        return original(weight, rows)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        rows = [next(saved) if one is None else one for one in ctx.rows]
        is_apart = is_recorded() or torch._C._functorch.is_legacy_batchedtensor(grad)
        if len(rows) == 1 and not is_apart:
            count = ctx.shape[0]
            ids = torch.where(rows[0] < 0, rows[0] + count, rows[0])  # some count from the end
            return None, sums_of_rows(grad, ids, ctx.shape), None
        sums = grad.new_zeros(ctx.shape, dtype=torch.float32)
        # Of torch's operators, which take None for a dimension; nothing is written to a batch.
        add: Any = torch.ops.aten.index_put if is_apart else torch.ops.aten.index_put_
        sums = add(sums, _places(rows, len(ctx.shape)), grad.float(), True)
        return None, sums.to(grad.dtype), None


def _places(rows: list[Any], dims: int) -> list[Tensor | None]:
    """Return for each dimension what is taken along it, or None."""
    found: list[Tensor | None] = []
    for one in rows:
        if one is ...:
            found += [None] * (dims - len(rows) + 1)
        else:
            found.append(one if isinstance(one, Tensor) else None)
    return found
