"""Lists of tensors by device and dtype; where the numbers of sparse and complex ones lie.

Knows nothing of what is done to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .getters import DEVICE, DTYPE, IS_CPU, IS_SPARSE


def alike(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists into groups, in each of which a list has one device and dtype.

    torch's multi-tensor functions make one launch only for such lists. For example,
    ``alike([a_fp32, b_fp16, c_fp32])`` is ``[([a_fp32, c_fp32],), ([b_fp16],)]``.

    Args:
        lists: of the same length; tensors at one index belong together, and stay so.
    """
    if len(lists[0]) <= 1:
        return [tuple(list(tensors) for tensors in lists)] if lists[0] else []
    if all(_is_uniform(tensors) for tensors in {id(one): one for one in lists}.values()):
        return [tuple(list(tensors) for tensors in lists)]
    groups: dict[Any, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        group = groups.setdefault(kind_of(row), tuple([] for _ in row))
        for tensors, tensor in zip(group, row, strict=True):
            tensors.append(tensor)
    return list(groups.values())


def kind_of(row: Sequence[Tensor]) -> Any:
    """Return the device and the dtype of each tensor."""
    return tuple((tensor.device, tensor.dtype) for tensor in row)


def _is_uniform(tensors: Sequence[Tensor]) -> bool:
    # Most lists are, and this runs several times a step. To compare devices costs most.
    if len(set(map(DTYPE, tensors))) > 1:
        return False
    return all(map(IS_CPU, tensors)) or len(set(map(DEVICE, tensors))) == 1


def dense(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the `values` of each tensor; the list itself where all are dense and real."""
    if any(map(IS_SPARSE, tensors)) or any(map(Tensor.is_complex, tensors)):
        return [values(tensor) for tensor in tensors]
    return tensors


def values(tensor: Tensor) -> Tensor:
    """Return the dense real tensor that holds a gradient's numbers, a view of the same memory."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def fills_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers lie without gaps, each once, in whatever order they are."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
