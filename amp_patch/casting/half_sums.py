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

from .mode import HALVES
from .shared_casts import is_recorded

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
    counts = _counts(index, size, rows.dim()) if is_mean else None
    is_first = dim in (0, -rows.dim())  # as nearly always: no views of it are made
    found: Tensor = _Sums.apply(rows if is_first else rows.movedim(dim, 0), index, counts, size)
    return found if is_first else found.movedim(0, dim)


def _counts(index: Tensor, size: int, dims: int) -> Tensor:
    """Return how many rows each sum has, at least 1, in a shape that divides the sums."""
    counts = torch.zeros(size, device=index.device)
    counts.scatter_add_(0, index, torch.ones(len(index), device=index.device))
    return counts.clamp_(min=1).view(_along_first(dims))


class _Sums(Function):
    """The sums of rows along the first dimension."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, counts: Tensor | None, size: int) -> Tensor:
        ctx.save_for_backward(index, counts)
        sums = torch.zeros((size, *rows.shape[1:]), device=rows.device)
        for piece, places in _pieces(rows, index):
            places = places.view(_along_first(rows.dim())).expand_as(piece)
            sums.scatter_add_(0, places, piece.float())
        return (sums if counts is None else sums.div_(counts)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, counts = ctx.saved_tensors
        half = grad.dtype
        if counts is not None:
            grad = (grad / counts).to(half)  # in float32, as the counts are
        if torch.is_grad_enabled():  # what is derived once more adds up in float32, too
            return grad.float().index_select(0, index).to(half), None, None, None
        return grad.index_select(0, index), None, None, None


def _pieces(rows: Tensor, index: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return rows, and their indices, some at a time."""
    least = _LEAST if rows.is_cpu else _LEAST_ON_GPU
    count = round(rows.numel() / max(least, _SHARE * rows.numel()))
    if count < 2:
        return [(rows, index)]
    length = -(-len(index) // count)
    return zip(rows.split(length), index.split(length), strict=True)


def _along_first(dims: int) -> list[int]:
    """Return the shape that lays numbers along the first of several dimensions."""
    return [-1, *[1] * (dims - 1)]
