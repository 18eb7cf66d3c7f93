"""Collectives on many tensors at once: one flat tensor per dtype and device. Knows no module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype and device as one, 1-dim, in their order."""
    flat: Tensor = _flatten_dense_tensors(bucket)
    return flat


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the views of a flat tensor that have the shapes of ``bucket``; undoes `flatten`."""
    views: Sequence[Tensor] = _unflatten_dense_tensors(coalesced, bucket)
    return views


def split_by_type(tensors: Iterable[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """Return tensors by ``tensor.type()`` (dtype and kind of device), in order."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the float16, the float32 and the float64 tensors, in lists where there are any."""
    dtypes = (torch.float16, torch.float32, torch.float64)
    given = list(tensors)
    buckets = [[tensor for tensor in given if tensor.dtype is dtype] for dtype in dtypes]
    return [bucket for bucket in buckets if bucket]


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Apply a collective in place to tensors of one dtype and device.

    Args:
        bucket: tensors of any shapes.
        call: as `torch.distributed.all_reduce`, after which the sum is divided by the number of
            processes, or `torch.distributed.broadcast`.
        extra_args: passed to ``call`` after the tensor: ``(0,)``, the source of a broadcast.
    """
    coalesced = flatten(bucket)
    call(coalesced, *(extra_args or ()))
    if call is dist.all_reduce:
        coalesced /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
        tensor.copy_(synced)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Apply a collective in place to tensors of any dtypes: `apply_flat_dist_call` for each."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)
