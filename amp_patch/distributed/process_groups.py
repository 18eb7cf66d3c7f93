"""Which process groups form the ranks that make one step together; knows no flag and no scale."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed
from torch import Tensor

from .shards import is_spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


class StepRanks(NamedTuple):
    """The ranks that make the steps of one optimizer together.

    Attributes:
        groups: the process groups that they form.
        have_parts: True where the plain tensors that one of them steps are its part of what all
            step; else these are the same on all. (Of a DTensor the mesh tells.)
        parts: the ids of those that are; None: all of them.
    """

    groups: Sequence[ProcessGroup] = ()
    have_parts: bool = False
    parts: frozenset[int] | None = None


def is_on() -> bool:
    """Return whether this process is one of several that know each other."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def has_others() -> bool:
    """Return whether there are ranks beside this one."""
    return is_on() and torch.distributed.get_world_size() > 1


def rank() -> int:
    """Return which rank this process is, where no group is made yet as its launcher says."""
    return torch.distributed.get_rank() if is_on() else int(os.environ.get("RANK", "0"))


def groups_of(params: Iterable[Tensor]) -> list[ProcessGroup]:
    """Return the groups over which parameters are spread, in the same order on every rank.

    A DTensor lies on a mesh of ranks (FSDP2, tensor parallel, both): the groups of all dimensions
    of the mesh, or the one of all ranks where the mesh has them all. Other parameters have none:
    `DistributedDataParallel` averages their gradients, so that all ranks find the same in them.

    Args:
        params: what an optimizer steps; the same on every rank, in the same order.
    """
    if not is_on():
        return []
    meshes: list[Any] = []
    for param in params:
        if is_spread(param):
            mesh = param.device_mesh  # type: ignore[attr-defined]  # it is a DTensor
            if not any(mesh is known or mesh == known for known in meshes):
                meshes.append(mesh)
    return without_repetition(group for mesh in meshes for group in _groups_of_mesh(mesh))


def without_repetition(groups: Iterable[ProcessGroup]) -> list[ProcessGroup]:
    """Return each group of several ranks once; where one has all ranks, that one alone."""
    found: dict[str, ProcessGroup] = {}
    for group in groups:
        if group.size() == torch.distributed.get_world_size():
            return [group] if group.size() > 1 else []
        if group.size() > 1:
            found.setdefault(group.group_name, group)
    return list(found.values())


def _groups_of_mesh(mesh: Any) -> Sequence[ProcessGroup]:
    if mesh.size() == torch.distributed.get_world_size():
        world = torch.distributed.group.WORLD
        assert world is not None
        return [world]
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
