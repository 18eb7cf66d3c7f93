"""Adds gradients to those that were there before a backward; knows nothing of scales."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.distributed.shards import any_spread, local
from amp_patch.kernels.getters import IS_SPARSE
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.parameter_lists import are_same, store_grads

from .param_pairs import ParamPairs


class Sums(NamedTuple):
    """What came of adding.

    Attributes:
        found_inf: as `GradCheck` has it, not 0 where only a sum overflowed.
        were_made: whether anything was added to something.
    """

    found_inf: list[Tensor]
    were_made: bool


@without_grad
def add_to_earlier(pairs: ParamPairs, grads: list[Tensor], aside: Mapping[int, Tensor]) -> Sums:
    """Store gradients at masters, plus what each had.

    Args:
        pairs: whose gradients these are.
        grads: unscaled.
        aside: what a parameter that is its own master had, by its id; a master has its own.
    """
    earlier = _earlier(pairs, aside)
    rest_was_added = False
    are_there = all(map(operator.is_not, earlier, repeat(None)))
    if are_there and not any(map(IS_SPARSE, chain(earlier, grads))):  # most often
        store_grads(pairs.master, earlier)
    else:
        dense: list[tuple[Any, Tensor]] = []
        for master, before, grad in zip(pairs.master, earlier, grads, strict=True):
            if before is None:
                master.grad = grad
            elif before.is_sparse or grad.is_sparse:  # no DTensor is
                master.grad = _sum(before, grad)
                rest_was_added = True
            else:
                dense.append((before, grad))
                master.grad = before
        earlier, grads = [before for before, _ in dense], [grad for _, grad in dense]
    if any_spread(earlier):
        earlier, grads = list(map(local, earlier)), list(map(local, grads))
    # Two finite numbers of other dtypes do not add up to inf in any training.
    halves = [before for before in earlier if before.dtype is torch.float16]
    # What was not finite before was an overflow of that loss, and is none of this one's.
    were_finite = list(map(torch.isfinite, halves))
    if earlier:
        kernels.accumulate(earlier, grads)
    found: dict[torch.device, Tensor] = {}
    for half, finite in zip(halves, were_finite, strict=True):
        flag = (finite & ~torch.isfinite(half)).any().float().reshape(1)
        found[half.device] = torch.maximum(flag, found.get(half.device, flag))
    return Sums(list(found.values()), rest_was_added or bool(earlier))


def _earlier(pairs: ParamPairs, aside: Mapping[int, Tensor]) -> list[Any]:
    """Return what each had, or None."""
    if are_same(*pairs):
        return list(map(aside.get, map(id, pairs.model)))
    return [
        aside.get(id(param)) if param is master else master.grad
        for param, master in zip(*pairs, strict=True)
    ]


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Add two gradients of which one is sparse at least."""
    if a.is_sparse and b.is_sparse:
        # torch adds no sparse half tensors on the CPU; entries of one row count as their sum.
        indices = torch.cat([a._indices(), b._indices()], dim=1)
        entries = torch.cat([a._values(), b._values()])
        return torch.sparse_coo_tensor(indices, entries, a.shape, check_invariants=False)
    return b + a if a.is_sparse else a + b
