"""Tensors in one flat tensor, and back, as apex's extension had it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the numbers of dense tensors of one dtype and device in a new tensor, 1-dim."""
    flat: Tensor = _flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor (1-dim) with the shapes of tensors, one after another."""
    return list(_unflatten_dense_tensors(flat, tensors))
