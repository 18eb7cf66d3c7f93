"""Sums of half rows at indices, added up in float32 without a float32 copy of all rows.

Such are the messages of a graph's edges that arrive at one node: far more numbers than the nodes
have. Knows tensors; nothing of functions, rules or modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import FunctionCtx

from amp_patch.casting.shared_casts import is_recorded
from amp_patch.levels import HALVES

#: How many numbers are in float32 at once, about: a share of all, but no less than 1 MB, or 8 MB on
#: a GPU, where each piece is two launches.
_SHARE, _LEAST, _LEAST_ON_GPU = 1 / 16, 1 << 18, 1 << 21


def can_add(rows: Any, index: Any, dim: Any, size: Any) -> bool:
    """Return whether `add_rows` takes these: plain tensors, and torch derives by a backward."""
    if type(rows) is not Tensor or type(index) is not Tensor or rows.dtype not in HALVES:
        return False
    if rows.layout is not torch.strided or index.dtype is not torch.int64 or index.dim() != 1:
        return False
    if type(dim) is not int or not -rows.dim() <= dim < rows.dim():
        return False
    is_one_each = 0 < len(index) == rows.size(dim) and index.device == rows.device
    is_known = is_one_each and (size is None or type(size) is int)
    return is_known and forward_ad._current_level < 0 and not is_recorded()


def add_rows(rows: Tensor, index: Tensor, dim: int, size: int | None, is_mean: bool) -> Tensor:
    """Return the sum, or mean, of the rows that have one index: in half, rounded once.

    Args:
        rows: half, such as `can_add` returns True for.
        index: of each along ``dim``.
        dim: along which the rows follow each other.
        size: how many sums there are; None: as many as the largest index says.
        is_mean: whether each sum is divided by the number of its rows.
    """
    size = int(index.max()) + 1 if size is None else size
    dim %= rows.dim()
    counts = _counts(index, size, _along(dim, rows)) if is_mean else None
    if rows.numel() < 2 * _least(rows):  # a gradient in float32 is as small, and torch's own nodes
        return sums_at(rows, index, counts, dim, size)  # take the host half as long as ours
    found: Tensor = _Sums.apply(rows, index, counts, dim, size)
    return found


def _counts(index: Tensor, size: int, shape: list[int]) -> Tensor:
    """Return how many rows each sum has, at least 1, in a shape that divides the sums."""
    counts = torch.zeros(size, device=index.device, dtype=torch.float32)
    counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.float32))
    return counts.clamp_(min=1).view(shape)


class _Context(FunctionCtx):
    """What the backward of `_Sums` gets of its forward."""

    dim: int
    saved_tensors: tuple[Tensor, Tensor | None]


class _Sums(Function):
    """The sums of rows along a dimension, laid out as torch lays out a new tensor."""

    @staticmethod
    def forward(
        ctx: _Context, rows: Tensor, index: Tensor, counts: Tensor | None, dim: int, size: int
    ) -> Tensor:
        ctx.save_for_backward(index, counts)  # type: ignore[arg-type]  # None it takes, too
        ctx.dim = dim
        return sums_at(rows, index, counts, dim, size)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> Any:
        index, counts = ctx.saved_tensors
        half = grad.dtype
        if counts is not None:
            grad = (grad / counts).to(half)  # in float32, as the counts are
        if torch.is_grad_enabled():  # what is derived once more adds up in float32, too
            grad = grad.float().index_select(ctx.dim, index).to(half)
        else:
            grad = grad.index_select(ctx.dim, index)
        return grad, None, None, None, None


def sums_at(rows: Tensor, index: Tensor, counts: Tensor | None, dim: int, size: int) -> Tensor:
    """Return what `add_rows` does, by torch's own nodes.

    Args:
        rows, index, dim: see `add_rows`.
        counts: what the sums are divided by; None: by nothing.
        size: how many sums there are.
    """
    shape = [*rows.shape]
    shape[dim] = size
    sums = torch.zeros(shape, device=rows.device, dtype=torch.float32)
    for piece, places in _pieces(rows, index, dim):
        places = places.view(_along(dim, rows)).expand_as(piece)
        sums.scatter_add_(dim, places, piece.float())
    return (sums if counts is None else sums.div_(counts)).to(rows.dtype)


def _least(rows: Tensor) -> int:
    return _LEAST if rows.is_cpu else _LEAST_ON_GPU


def _pieces(rows: Tensor, index: Tensor, dim: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return rows, and their indices, some at a time."""
    count = round(rows.numel() / max(_least(rows), _SHARE * rows.numel()))
    if count < 2:
        return [(rows, index)]
    length = -(-len(index) // count)
    return zip(rows.split(length, dim), index.split(length), strict=True)


def _along(dim: int, rows: Tensor) -> list[int]:
    """Return the shape that lays numbers along a dimension of rows."""
    shape = [1] * rows.dim()
    shape[dim] = -1
    return shape
