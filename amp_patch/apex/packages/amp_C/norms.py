"""The 2-norms of lists of tensors, taken in float32, with a check for what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike

from .scaling import multi_tensor_scale
from .tensor_lists import Lists, columns_of, raise_flag

Norms = tuple[Tensor, Tensor]


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> Norms:
    """Return the norm of all tensors, and on demand of each.

    Args:
        chunk_size: without effect.
        noop_flag: int32, shape (1,); set to 1 where a norm is not finite. Its value before is not
            looked at.
        tensor_lists: [tensors], of any floating dtypes.
        per_tensor: whether the norm of each is asked for.

    Returns:
        float32 of shape (1,), and of shape (number of tensors,), or (0,) where not asked for.
    """
    (tensors,) = columns_of(tensor_lists, 1)
    if not tensors:
        none = torch.zeros(1, device=noop_flag.device, dtype=torch.float32)
        return none, none[:0]
    norms = norm_of_each(tensors)
    raise_flag(noop_flag, ~torch.isfinite(norms).all())
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms.new_empty(0)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> Norms:
    """As `multi_tensor_l2norm`; where the flag is set already all norms are 0."""
    was_set = noop_flag.reshape(()) != 0
    norms = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    total, each = (norm.masked_fill(was_set.to(norm.device), 0.0) for norm in norms)
    return total, each


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    scale: float,
    per_tensor: bool | None = None,
) -> Norms:
    """Write ``inputs * scale`` to outputs, and return the norms of the inputs, not multiplied.

    Args:
        chunk_size, noop_flag: as of `multi_tensor_l2norm`.
        tensor_lists: [inputs, outputs], of any floating dtypes; an output may be its input.
        scale: the factor.
        per_tensor: whether the norm of each is asked for.

    Returns:
        As `multi_tensor_l2norm`.
    """
    inputs, outputs = columns_of(tensor_lists, 2)
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [inputs], per_tensor)
    multi_tensor_scale(chunk_size, noop_flag, [inputs, outputs], scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> Norms:
    """Return the norms that tensors would have, multiplied by ``inv_scale``; none is changed.

    Args:
        chunk_size, noop_flag: as of `multi_tensor_l2norm`.
        tensor_lists: [tensors], of any floating dtypes.
        inv_scale: float32, one element.
        per_tensor: whether the norm of each is asked for.

    Returns:
        As `multi_tensor_l2norm`.
    """
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = inv_scale.to(total.device, torch.float32).abs().reshape(1)
    return total * factor, each * factor


def norm_of_each(tensors: list[Tensor]) -> Tensor:
    """Return the 2-norm of each tensor: float32, shape (number of tensors,)."""
    norms: dict[int, Tensor] = {}
    for part, own in _numbered(tensors):
        found = torch._foreach_norm(part, 2.0, dtype=_norm_dtype(part[0]))
        norms.update(zip(own, found, strict=True))
    device = tensors[0].device
    return torch.stack([norms[i].to(device, torch.float32) for i in range(len(tensors))])


def _norm_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _numbered(tensors: list[Tensor]) -> list[tuple[list[Tensor], list[int]]]:
    """Split a list so that each part has one dtype and device; with the places in the list."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(id(tensor), []).append(place)
    return [(part, [places[id(tensor)].pop(0) for tensor in part]) for (part,) in alike(tensors)]
