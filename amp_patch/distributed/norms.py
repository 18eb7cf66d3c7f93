"""The norm of gradients that are spread over ranks, and clipping by it; knows no optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels.torch_norms import CLIP_EPS, clip_factor, combined, norms_of, total_norm
from amp_patch.kernels.without_grad import without_grad

from .agreement import device_of
from .process_groups import StepRanks
from .shards import any_spread, is_spread, local, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


@without_grad
def clip_by_norm(
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    ranks: StepRanks,
    stages: ProcessGroup | None = None,
    device: torch.device | None = None,
    whole: Container[int] = (),
    accept: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Clip gradients by their norm over all ranks that hold parts of them, in place.

    Args:
        grads: those that this rank steps; DTensors, or plain tensors.
        max_norm: what the norm is to be at most.
        norm_type: the p of the p-norm, inf included.
        ranks: of the optimizer; all must come here.
        stages: ranks that each have gradients of another part of the model; all must come here.
        device: where gradients would be, should this rank have none; None: one of its groups'.
        whole: the ids of plain tensors that are the same on all ranks, where others are parts.
        accept: gets the norm before anything is clipped, and raises to have nothing clipped.

    Returns:
        The total norm before, 0-dim, the same on all ranks.
    """
    are_parts = ranks.have_parts and bool(ranks.groups)
    if stages is None and not are_parts and not any_spread(grads):
        if accept is None:
            return kernels.clip_by_norm(grads, max_norm, norm_type)
        accept(total := total_norm(grads, norm_type))
        return kernels.clip_by_norm(grads, max_norm, norm_type, total)
    # Gradients that the same ranks hold parts of are added by the same collectives.
    together: dict[tuple[str, ...], tuple[Sequence[ProcessGroup], list[Tensor]]] = {}
    if are_parts:  # of which this rank may hold none
        together[_names(ranks.groups)] = ranks.groups, []
    for given, grad in zip(grads, map(summed, grads), strict=True):
        is_part = are_parts and id(given) not in whole
        groups = _holders(grad) if is_spread(grad) else ranks.groups if is_part else ()
        together.setdefault(_names(groups), (groups, []))[1].append(local(grad))
    parts = [local(grad) for grad in grads]
    # A rank that holds no gradient takes part, too, and by the same backend as the others.
    if parts or device is None:
        device = parts[0].device if parts else device_of(stages or ranks.groups[0])
    norms = [_over(groups, own, norm_type, device) for groups, own in together.values()]
    total = combined(norms, norm_type).to(device)
    if stages is not None:
        total = _over([stages], [total], norm_type, device)
    if accept is not None:
        accept(total)
    kernels.multiply(parts, clip_factor(total, max_norm, CLIP_EPS))
    return total


def _over(
    groups: Sequence[ProcessGroup], parts: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm of tensors that lie in parts on the ranks of some groups."""
    norm = combined(norms_of(parts, norm_type), norm_type).to(device)
    if not groups:
        return norm
    is_largest = norm_type == math.inf
    power = norm if is_largest else norm**norm_type
    operation = torch.distributed.ReduceOp.MAX if is_largest else torch.distributed.ReduceOp.SUM
    for group in groups:
        torch.distributed.all_reduce(power, operation, group)
    return power if is_largest else power ** (1.0 / norm_type)


def _holders(spread: Any) -> list[ProcessGroup]:
    """Return the groups whose ranks hold different parts of a DTensor."""
    mesh = spread.device_mesh
    return [
        mesh.get_group(dimension)
        for dimension, placement in enumerate(spread.placements)
        if not placement.is_replicate()
    ]


def _names(groups: Sequence[ProcessGroup]) -> tuple[str, ...]:
    return tuple(group.group_name for group in groups)
