"""Lookups of half rows on a CPU, whose gradients are added up in float32 (O2, O3, O5).

A CPU adds them up in half: of 1,000 words of one kind the gradient is off by 20 % in bfloat16, of
16,000 token types by more than half. A GPU adds up in float32. Knows torch's two functions that
look up rows of a table; nothing of modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import FunctionCtx
from torch.compiler import is_compiling
from torch.nn import Parameter

from amp_patch.casting.many_uses import in_parts, is_used_up, used
from amp_patch.casting.shared_casts import is_recorded
from amp_patch.levels import HALVES
from amp_patch.patching import stand_for

from .half_sums import sums_at

#: Of so few lookups in all, and for each row of a small table, even equal gradients add up in
#: bfloat16 without much loss: 10 and 4 %.
_FEW, _FEW_OF_A_ROW = 256, 64
#: Where ``per_sample_weights`` is among the arguments of ``torch.embedding_bag``, as torch's own
#: layers and functions call it.
_FACTORS = 6


def looking_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.embedding`` or ``torch.embedding_bag`` with gradients added up in float32."""
    is_bag = function.__name__ == "embedding_bag"
    run = _embedding_bag if is_bag else _embedding

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_bag and len(args) > _FACTORS:
            args = _of_one_dtype(*args)
        if is_compiling():
            return function(*args, **kwargs)
        if args and type(args[0]) is Parameter:  # as torch's layers call it
            if is_used_up(args[0]):
                args, kwargs = in_parts(args, kwargs)
        else:
            args, kwargs = used(args, kwargs)
        if len(args) > 1 and _loses_in_half(args[0], args[1]):
            return run(function, *args, **kwargs)
        return function(*args, **kwargs)

    return stand_for(wrapper, function)


def _of_one_dtype(weight: Any, *others: Any) -> tuple[Any, ...]:
    """Return what ``torch.embedding_bag`` takes, with factors in the dtype of a half table.

    Factors that the model makes itself, as ``torch.ones`` does, are float32, which torch refuses.
    """
    factors = others[_FACTORS - 1]
    if not (isinstance(weight, Tensor) and isinstance(factors, Tensor)):
        return weight, *others
    if weight.dtype in HALVES and factors.dtype is torch.float32:
        others = (*others[: _FACTORS - 1], factors.to(weight.dtype), *others[_FACTORS:])
    return weight, *others


def _loses_in_half(weight: Any, ids: Any) -> bool:
    if not (isinstance(weight, Tensor) and isinstance(ids, Tensor)) or _is_tracing():
        return False
    count = ids.numel()
    if count <= _FEW_OF_A_ROW:  # asked first: what follows takes longer
        return False
    if not (weight.dtype in HALVES and weight.is_cpu and weight.requires_grad):
        return False
    if not torch.is_grad_enabled() or is_recorded() or forward_ad._current_level >= 0:
        return False
    return count > min(_FEW, _FEW_OF_A_ROW * weight.shape[0])


def _embedding(
    function: Callable[..., Any],
    weight: Tensor,
    ids: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if sparse:
        return function(weight, ids, padding_idx, scale_grad_by_freq, sparse)
    return _Lookup.apply(function, weight, ids, padding_idx, scale_grad_by_freq)


class _Context(FunctionCtx):
    """What the backward of `_Lookup` gets of its forward."""

    shape: torch.Size
    padding: int
    by_freq: bool
    saved_tensors: tuple[Tensor]


class _Lookup(Function):
    """Rows of a table."""

    @staticmethod
    def forward(
        ctx: _Context,
        function: Callable[..., Tensor],
        weight: Tensor,
        ids: Tensor,
        padding: int,
        by_freq: bool,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.by_freq = weight.shape, padding, by_freq
        return function(weight, ids, padding)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        if is_recorded() or torch._C._functorch.is_legacy_batchedtensor(grad):
            # `is_grads_batched` hands on many at once, which nothing here could write to.
            of_torch = torch.ops.aten.embedding_dense_backward
            given = of_torch(grad, ids, ctx.shape[0], ctx.padding, ctx.by_freq)
            return None, given, None, None, None
        # Of each row that was looked up alone: of all rows the sums would take 4 bytes a number.
        rows, places = torch.unique(ids.reshape(-1), return_inverse=True)
        sums = sums_at(grad.reshape(len(places), -1), places, None, 0, len(rows))
        if ctx.by_freq:
            sums = sums / torch.bincount(places)[:, None]
        if ctx.padding >= 0:
            sums = sums.masked_fill((rows == ctx.padding)[:, None], 0.0)
        rows_of_all = grad.new_zeros(ctx.shape).index_copy(0, rows.long(), sums)
        return None, rows_of_all, None, None, None


def _embedding_bag(
    function: Callable[..., Any],
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Look up in a float32 table of the rows that the bags hold, each of them once."""
    if sparse:
        return function(
            *(weight, ids, offsets, scale_grad_by_freq, mode, sparse),
            *(per_sample_weights, include_last_offset, padding_idx),
        )
    if padding_idx is not None and padding_idx < 0:  # counted from the end
        padding_idx += len(weight)
    rows, places = torch.unique(ids, return_inverse=True)
    table = weight.index_select(0, rows).float()
    found, *others = function(
        *(table, places, offsets, scale_grad_by_freq, mode, sparse),
        None if per_sample_weights is None else per_sample_weights.float(),
        include_last_offset,
        _place(rows, padding_idx),
    )
    return (found.to(weight.dtype), *others)


_is_tracing = torch._C._is_tracing  # who traces would be warned of a number


def _place(rows: Tensor, row: int | None) -> int | None:
    """Return where a row is among sorted ones; None where it is not."""
    if row is None:
        return None
    found = (rows == row).nonzero()
    return int(found[0]) if len(found) else None
