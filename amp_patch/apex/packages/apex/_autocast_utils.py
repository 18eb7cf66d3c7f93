"""Casts of arguments by torch.autocast's dtype, for functions that torch does not know."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.casting.nested import map_tensors

__all__ = ["_cast_if_autocast_enabled"]


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Return the arguments, on a GPU in the dtype of a ``torch.autocast`` around the call.

    Floating tensors are cast, also in containers; float64 ones and those on the CPU stay.
    """
    if not torch.is_autocast_enabled("cuda"):
        return args
    dtype = torch.get_autocast_dtype("cuda")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.is_cuda and tensor.is_floating_point()
        return tensor.to(dtype) if is_cast and tensor.dtype is not torch.float64 else tensor

    found: tuple[Any, ...] = map_tensors(cast, args)
    return found
