"""A backward in parts: one ends at a detached tensor, and its gradient begins the next one.

So write truncated backpropagation through time, checkpoints by hand, caches of gradients and split
learning. Knows tensors; no block and no scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.arguments.kinds import as_list
from amp_patch.distributed.shards import local


def goes_on(leaves: Iterable[Tensor], tensors: Any, grad_tensors: Any) -> bool:
    """Return whether a backward goes on where earlier ones have come to leaves.

    It is given their gradients, or is of what they were detached from: then the gradients may be
    copies, or come of ``torch.autograd.grad``.

    Args:
        leaves: that earlier ones have come to. Parameters are left out: nothing lies before them.
        tensors, grad_tensors: of ``torch.autograd.backward``.
    """
    inputs = _inputs(leaves)
    detached, written = _places(inputs), _places(leaf.grad for leaf in inputs)
    grads = as_list(grad_tensors)
    return all(grad is not None for grad in grads) and all(
        _place(grad) in written or _place(tensor) in detached
        for tensor, grad in zip(as_list(tensors), grads, strict=False)
    )


def begins_with_gradients_of(leaves: Iterable[Tensor], grad_tensors: Any) -> bool:
    """Return whether a backward is given gradients that earlier ones have written to leaves.

    Args:
        leaves, grad_tensors: see `goes_on`.
    """
    written = _places(leaf.grad for leaf in _inputs(leaves))
    return any(_place(grad) in written for grad in as_list(grad_tensors))


def _inputs(leaves: Iterable[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)]


def _places(tensors: Iterable[Any]) -> set[int | None]:
    return set(map(_place, tensors)) - {None}


def _place(tensor: Any) -> int | None:
    """Return the address of the memory that a tensor is in; None of what has none."""
    part = local(tensor)
    if not isinstance(part, Tensor) or part.layout is not torch.strided or part.is_meta:
        return None
    return part.untyped_storage().data_ptr() or None
