"""Half gradients as a script reads them after a block: true, though masters are what is stepped.

Knows pairs of parameters and masters; no optimizer and no loss scale.
"""

from __future__ import annotations

import operator
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_patch.distributed.shards import any_spread, local
from amp_patch.kernels.getters import GRAD, IS_CPU, IS_SPARSE
from amp_patch.kernels.tensor_lists import alike
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.parameter_lists import (
    are_complete,
    keeping_versions,
    look_up,
    stored_grads,
)

from .param_pairs import ParamPairs


@without_grad
def round_into_halves(pairs: ParamPairs) -> list[Tensor]:
    """Round the gradients that masters have now into those of their half parameters.

    Returns:
        Gradients that took the place of another: sparse ones, which cannot be written to.
    """
    has_master = list(map(operator.is_not, *pairs))
    if not all(has_master):
        pairs = pairs.select(has_master)
    halves: list[Any] = look_up(GRAD, pairs.model)
    own: list[Any] = stored_grads(pairs.master)
    replaced: list[Tensor] = []
    if not (_are_dense(halves) and _are_dense(own)):
        for param, half, grad in zip(pairs.model, halves, own, strict=True):
            if half is not None and grad is not None and (half.is_sparse or grad.is_sparse):
                param.grad = grad.to(half.dtype)
                replaced.append(param.grad)
        are_dense = [
            _is_dense(half) and _is_dense(grad) for half, grad in zip(halves, own, strict=True)
        ]
        halves, own = list(compress(halves, are_dense)), list(compress(own, are_dense))
    if any_spread(halves):
        halves, own = list(map(local, halves)), list(map(local, own))
    # On a CPU torch copies one after the other, whatever they are.
    is_one_call = bool(halves) and all(map(IS_CPU, halves)) and all(map(IS_CPU, own))
    for targets, sources in [(halves, own)] if is_one_call else alike(halves, own):
        write(targets, sources)
    return replaced


def write(halves: list[Tensor], values: list[Tensor]) -> None:
    """Write to half gradients; those that are views have the versions of before.

    The gradients that `DistributedDataParallel` keeps in a bucket, with
    ``gradient_as_bucket_view=True``, have one version together: what is written for one optimizer
    would look like a script's write to those of another.

    Args:
        halves: dense gradients.
        values: to be rounded into them.
    """
    views = list(filter(_IS_VIEW, halves))
    if not views:  # as most often
        torch._foreach_copy_(halves, values)
        return
    with keeping_versions(views):
        torch._foreach_copy_(halves, values)


_IS_VIEW = Tensor._is_view


def _are_dense(grads: list[Any]) -> bool:
    return are_complete(grads) and not any(map(IS_SPARSE, grads))


def _is_dense(grad: Tensor | None) -> bool:
    return grad is not None and not grad.is_sparse
