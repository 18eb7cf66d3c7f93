"""Which ranks step with an optimizer by what its engine says: FSDP1, ZeRO, or the user.

Knows modules and optimizers of torch; nothing of masters, levels or scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .flat_parameters import spread_modules, spread_params
from .process_groups import StepRanks, is_on, without_repetition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


def ranks_given(
    given: ProcessGroup | None, models: Iterable[nn.Module], optimizer: Optimizer, steps_share: bool
) -> StepRanks | None:
    """Return the ranks of an optimizer that do not follow from its parameters.

    Args:
        given: the process group that the user gave.
        models: looked through for `FullyShardedDataParallel` (FSDP1), whose parameters are plain
            tensors of this rank's part.
        optimizer: maybe a `ZeroRedundancyOptimizer`.
        steps_share: whether this rank handles the gradients of its own share alone.

    Returns:
        None where there is neither: then the parameters tell (`groups_of`).
    """
    found: list[ProcessGroup] = []
    parts: frozenset[int] | None = None
    if is_on():
        models = list(models)
        found = [one.process_group for model in models for one in spread_modules(model)]
        if steps_share:
            found.append(optimizer.process_group)  # type: ignore[attr-defined]  # it is one
        elif found:  # beside which there may be NO_SHARD, ignored_states, and other models
            parts = frozenset(id(param) for model in models for param in spread_params(model))
    if given is not None:
        return StepRanks(without_repetition([given]), bool(found), parts)
    return StepRanks(without_repetition(found), True, parts) if found else None


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what a `ZeroRedundancyOptimizer` steps this rank's share of the parameters by.

    Any other optimizer stands for itself.

    Raises:
        TypeError: one with ``overlap_with_ddp``, which steps inside of the backward.
    """
    if not is_zero(optimizer):
        return optimizer
    zero: Any = optimizer
    if zero._overlap_with_ddp:
        raise TypeError(
            "a ZeroRedundancyOptimizer must step when optimizer.step() is called, after the "
            "gradients were unscaled; got one with overlap_with_ddp=True, which steps inside of "
            "backward(). Call ZeroRedundancyOptimizer(..., overlap_with_ddp=False)."
        )
    found: Optimizer = zero.optim
    # zero broadcasts what its own lists hold: the half parameters, not the masters of them.
    found.param_groups[:] = [
        {**group, "params": list(group["params"])} for group in found.param_groups
    ]
    return found


def refuse_bucket_views(optimizers: Iterable[Optimizer]) -> None:
    """Raise for a `ZeroRedundancyOptimizer` that sends memory which no half parameter has.

    Raises:
        TypeError: as said.
    """
    for optimizer in optimizers:
        if is_zero(optimizer) and optimizer.parameters_as_bucket_view:  # type: ignore[attr-defined]  # it is one
            raise TypeError(
                "a ZeroRedundancyOptimizer must send the parameters themselves to the other ranks "
                "where amp.initialize() stores them in half; got one with "
                "parameters_as_bucket_view=True, whose buckets hold them in float32. Call "
                "ZeroRedundancyOptimizer(..., parameters_as_bucket_view=False)."
            )


def refuse_join(*_: Any, **__: Any) -> None:
    """Stand in the place of ``join_hook`` of a `ZeroRedundancyOptimizer`.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "a ZeroRedundancyOptimizer must make each step on all ranks, or on none, at a level with "
        "a loss scale or fp32 masters; got Join([..., optimizer]), by which a rank whose inputs "
        "have ended makes steps that others skip, and has no gradients for them. Leave Join out "
        "and give each rank as many batches, or call amp.initialize(..., opt_level='O4')."
    )


def is_zero(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is a `ZeroRedundancyOptimizer`."""
    # where nobody has imported it, there are none
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)
