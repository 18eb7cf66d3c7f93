"""Pipelines that split the backward (zero bubble), of stages that FSDP2 shards or that DDP has.

torch's second half of such a backward writes gradients past the hooks by which both share them
between ranks, so that replicas train apart without a word, with and without amp_patch (torch 2.13).
Knows modules and schedules of torch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from amp_patch.distributed.fully_sharded import sharded_modules

_MODULE = "torch.distributed.pipelining.schedules"


def replacements() -> dict[str, Callable[[Any], Any]]:
    """Return what makes the replacement of the step of such schedules, where torch has them."""
    if _MODULE not in sys.modules:
        return {}
    return {f"{_MODULE}.PipelineScheduleMulti.step": _refusing}


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(original)
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if schedule not in known:
            _refuse(schedule)
            known.add(schedule)
        return original(schedule, *args, **kwargs)

    return step


def _refuse(schedule: Any) -> None:
    """Raise for a schedule that trains wrongly, on every rank before it begins.

    Raises:
        RuntimeError: as said.
    """
    actions = [one for row in schedule.pipeline_order.values() for one in row if one is not None]
    if not any(one.computation_type.name == "BACKWARD_INPUT" for one in actions):
        return
    count = sum(
        isinstance(stage.submod, DistributedDataParallel) or bool(sharded_modules(stage.submod))
        for stage in schedule._stages
    )
    if count:
        raise RuntimeError(
            "a schedule that splits the backward must have stages whose gradients no other rank "
            "shares, for torch leaves them unshared; got a schedule of type "
            f"{type(schedule).__name__} with {count} stages in DistributedDataParallel or sharded "
            "by fully_shard(). Take ScheduleInterleaved1F1B(stages, ...), or leave the wrapper or "
            "fully_shard() out."
        )
