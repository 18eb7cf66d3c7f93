"""Gives many small tensors one memory that they share, so that one call works on all of it.

A call for each would cost the host more time than the few bytes cost the device. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .tensor_lists import alike

_SMALL = 1 << 12  # elements
_ALIGNMENT = 64  # bytes; as of memory that torch allocates, for vectorized kernels


def is_small(tensor: Tensor) -> bool:
    """Return whether a tensor is worth sharing its memory with others."""
    return tensor.numel() <= _SMALL


def share_most(tensors: Sequence[Tensor]) -> bool:
    """Return whether several tensors take up most of the memory that they share, as here."""
    taken = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    return len(tensors) > 1 and 2 * taken >= tensors[0].untyped_storage().nbytes()


def allocate(models: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Make tensors like others, one allocation per device and dtype.

    Args:
        models: tensors of any shapes and dense layouts; None for no tensor.

    Returns:
        The allocations, flat and full of zeros, and for each model a tensor in them of its shape,
        dtype and memory format, and with a version of its own; None for None.
    """
    pools: list[Tensor] = []
    made: dict[int, Tensor] = {}
    for (group,) in alike([model for model in models if model is not None]):
        unit = _ALIGNMENT // group[0].element_size()
        lengths = [-(-model.numel() // unit) * unit for model in group]
        pool = torch.zeros(sum(lengths), dtype=group[0].dtype, device=group[0].device)
        pools.append(pool)
        for model, offset in zip(group, accumulate(lengths, initial=0), strict=False):
            stride = torch.empty_like(model, device="meta").stride()
            # `data`, for torch refuses detach_() of a view, by which scripts clear gradients
            made[id(model)] = pool.as_strided(model.shape, stride, offset).data
    return pools, [None if model is None else made[id(model)] for model in models]


def move_together(params: Sequence[Tensor]) -> None:
    """Give small parameters a memory that they share, instead of one for each.

    Large ones stay where they are, and such as share their memory already: the flat weights of a
    recurrent layer, and those of a model that several processes train.
    """
    chosen = [p for p in params if is_small(p) and p.untyped_storage().nbytes() == p.nbytes]
    chosen = [p for p in chosen if not (p.is_cpu and p.is_shared())]
    _, places = allocate(chosen)
    for param, place in zip(chosen, places, strict=True):
        assert place is not None
        param.data = place.copy_(param.data)
