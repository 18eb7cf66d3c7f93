"""Adds gradients to those that were there before a backward; knows nothing of scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.distributed.shards import local

from .param_pairs import ParamPairs


class Sums(NamedTuple):
    """What came of adding.

    Attributes:
        found_inf: as `GradCheck` has it, not 0 where only a sum overflowed.
        were_made: whether anything was added to something.
    """

    found_inf: list[Tensor]
    were_made: bool


@torch.no_grad()
def add_to_earlier(pairs: ParamPairs, grads: list[Tensor], aside: Mapping[int, Tensor]) -> Sums:
    """Store gradients at masters, plus what each had.

    Args:
        pairs: whose gradients these are.
        grads: unscaled.
        aside: what a parameter that is its own master had, by its id; a master has its own.
    """
    were_made = False
    dense: list[tuple[Tensor, Tensor]] = []
    for param, master, grad in zip(*pairs, grads, strict=True):
        earlier = aside.get(id(param)) if param is master else master.grad
        if earlier is None:
            master.grad = grad
        elif earlier.is_sparse or grad.is_sparse:  # no DTensor is
            master.grad = _sum(earlier, grad)
            were_made = True
        else:
            dense.append((local(earlier), local(grad)))
            master.grad = earlier
    # Two finite numbers of other dtypes do not add up to inf in any training.
    halves = [earlier for earlier, _ in dense if earlier.dtype is torch.float16]
    # What was not finite before was an overflow of that loss, and is none of this one's.
    were_finite = list(map(torch.isfinite, halves))
    if dense:
        kernels.accumulate([earlier for earlier, _ in dense], [grad for _, grad in dense])
    found: dict[torch.device, Tensor] = {}
    for half, finite in zip(halves, were_finite, strict=True):
        flag = (finite & ~torch.isfinite(half)).any().float().reshape(1)
        found[half.device] = torch.maximum(flag, found.get(half.device, flag))
    return Sums(list(found.values()), were_made or bool(dense))


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Add two gradients of which one is sparse at least."""
    if a.is_sparse and b.is_sparse:
        # torch adds no sparse half tensors on the CPU; entries of one row count as their sum.
        indices = torch.cat([a._indices(), b._indices()], dim=1)
        entries = torch.cat([a._values(), b._values()])
        return torch.sparse_coo_tensor(indices, entries, a.shape, check_invariants=False)
    return b + a if a.is_sparse else a + b
