"""The small training in a pipeline: each rank has one stage of the model, or several.

With more than one replica each stage is sharded by FSDP2 over as many ranks, or they have it whole
in a `DistributedDataParallel`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import rank_training as training
import torch
from rank_training import Trained
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from amp_patch import amp

MICRO_BATCHES = 4
#: A sum over micro-batches is averaged at the end, and must not overflow before.
OPTIONS = {"max_loss_scale": 2.0**11}
#: step -> the rank in whose gradients an inf is planted; -1: in the loss of one micro-batch.
PLANTS = {2: 0, 4: -1, 5: 1}
SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
#: Of two stages on each rank. The last two split the backward: of inputs first, of weights later.
LOOPED = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zero-bubble-v": ScheduleZBVZeroBubble,
}
#: The rank of two that has the last stage.
LAST = {"zero-bubble-v": 0}


def stages_of(schedule: str, rank: int) -> dict[int, nn.Module]:
    """Return the stages that a rank of two has, by their number."""
    model = training.make_model()
    assert isinstance(model, nn.Sequential)
    if schedule in LOOPED:
        second = 3 - rank if schedule == "zero-bubble-v" else rank + 2
        return {number: model[number : number + 1] for number in (rank, second)}
    return {rank: model[2:] if rank else model[:2]}


def whole_params(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of some stages, by the names that they have in the whole model."""
    named: dict[str, Tensor] = {}
    for stage in stages:
        named.update(training.whole_params(stage))
    return named


def make_schedule(
    schedule: str, stages: dict[int, nn.Module], group: Any, micro_batches: int, loss_fn: Any
) -> Any:
    """Return torch's schedule for the stages of this rank, among those of a group."""
    count = group.size() * len(stages)
    made = [
        PipelineStage(stage, number, count, torch.device("cpu"), group=group)
        for number, stage in stages.items()
    ]
    if schedule in LOOPED:
        return LOOPED[schedule](made, micro_batches, loss_fn=loss_fn)
    return SINGLE[schedule](made[0], micro_batches, loss_fn=loss_fn)


def in_replicas(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a stage in a wrapper of the ranks that have it, if it has parameters.

    Without ``find_unused_parameters`` torch's own assertion fails in the schedules of which a
    forward follows on another.
    """
    if not list(stage.parameters()):
        return stage
    group = mesh["data"].get_group()
    return DistributedDataParallel(stage, process_group=group, find_unused_parameters=True)


def scaling_of(level: str) -> dict[str, Any]:
    """Return the options of the loss scale, of levels that have one."""
    return {**training.SCALES, **OPTIONS} if level in training.SCALED else {}


def planted(step: int, level: str, share: int) -> int | None:
    """Return where a replica has an inf in a step: the first one alone, where there is a scale.

    Of replicas that have the gradients whole, each is the first.
    """
    return PLANTS.get(step) if level in training.SCALED and share == 0 else None


def train(
    schedule: str,
    level: str,
    steps: int,
    max_norm: float | None,
    replicas: int = 1,
    shards: bool = True,
) -> Trained:
    """Train by a pipeline on pairs of ranks; its result has the parameters of this rank's stages.

    Args:
        schedule: a key of `SINGLE` or `LOOPED`.
        level: "O1" ...
        steps: how many.
        max_norm: gradients are clipped to it, over all stages.
        replicas: how many pairs.
        shards: whether they share each stage by FSDP2; else they have it in DDP.
    """
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("stage", "data"))
    rank, share = mesh["stage"].get_local_rank(), mesh["data"].get_local_rank()
    group, micro_batches = mesh["stage"].get_group(), MICRO_BATCHES // replicas
    last = LAST.get(schedule, 1)
    stages = stages_of(schedule, rank)
    if shards and replicas > 1:
        stages = {number: training.sharded(one, mesh["data"]) for number, one in stages.items()}
    params = [param for stage in stages.values() for param in stage.parameters()]
    _, optimizer = amp.initialize(
        list(stages.values()),
        training.adamw(params),
        opt_level=level,
        verbosity=0,
        process_group=distributed.group.WORLD,
        **scaling_of(level),
    )
    if not shards:
        stages = {number: in_replicas(one, mesh) for number, one in stages.items()}

    def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean() * scale

    pipeline = make_schedule(schedule, stages, group, micro_batches, scaled_loss)
    norms, losses, held, skipped = [], [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, share, replicas)
        plant, of_each = planted(step, level, share if shards else 0), []
        if plant == -1:
            targets[training.BATCH // MICRO_BATCHES] = float("inf")  # the first of a micro-batch
        with amp.scale_loss(torch.ones(()), optimizer) as scale:
            given = (inputs,) if rank == 0 else ()
            pipeline.step(*given, target=targets if rank == last else None, losses=of_each)
            if plant == rank:
                training.plant(nn.ModuleList(stages.values()))
        if max_norm is not None:
            norms.append(amp.clip_grad_norm_(optimizer, max_norm, process_group=group).item())
        optimizer.step()
        losses.append(sum(loss.item() for loss in of_each) / micro_batches / scale.item())
        held.append(amp.loss_scale())
        skipped.append(amp.step_was_skipped(optimizer))
    values = whole_params(stages.values())
    amp.deactivate()
    return Trained(values, [], norms, losses, held, skipped, [])


def train_and_compare(
    schedule: str,
    levels: tuple[str, ...],
    steps: int,
    max_norm: float | None,
    replicas: int = 1,
    shards: bool = True,
) -> dict[str, tuple[Trained, Trained | None]]:
    """Return for each level what the pipeline trains here, and on rank 0 what that trains alone."""
    found = {}
    for level in levels:
        is_scaled = level in training.SCALED
        infs, options = (PLANTS, OPTIONS) if is_scaled else ({}, {})
        is_first = distributed.get_rank() == 0
        alone = (
            training.train("none", level, steps, infs, max_norm, **options) if is_first else None
        )
        trained = train(schedule, level, steps, max_norm, replicas, shards)
        found[level] = trained, alone
    return found


def warnings_of_a_factor(**options: Any) -> list[str]:
    """Return what a block warns of that is given the factor of losses."""
    model = nn.Linear(2, 2)
    model, optimizer = amp.initialize(
        model, training.adamw(model.parameters()), opt_level="O1", verbosity=0, **options
    )
    with (
        warnings.catch_warnings(record=True) as caught,
        amp.scale_loss(torch.ones(()), optimizer) as scale,
    ):
        (model(torch.ones(2)).float().sum() * scale).backward()
    amp.deactivate()
    return [str(one.message) for one in caught]


def warnings_with_and_without_a_group() -> tuple[list[str], list[str]]:
    return warnings_of_a_factor(), warnings_of_a_factor(process_group=distributed.group.WORLD)


def said_of_replicas(schedule: str, shards: bool) -> str:
    """Return what is said of a pipeline, all on this rank, of stages in FSDP2 or in DDP."""
    layers: list[nn.Module] = [nn.Linear(7, 7) for _ in range(2)]
    if shards:
        layers = [training.sharded(layer) for layer in layers]
    params = [param for layer in layers for param in layer.parameters()]
    amp.initialize(layers, training.adamw(params), opt_level="O1", verbosity=0)
    if not shards:
        layers = [DistributedDataParallel(layer, find_unused_parameters=True) for layer in layers]
    stages = dict(enumerate(layers))
    before = [param.detach().clone() for param in params]
    pipeline = make_schedule(schedule, stages, distributed.group.WORLD, 2, nn.functional.mse_loss)
    try:
        pipeline.step(torch.ones(2, 7), target=torch.ones(2, 7))
    except RuntimeError as error:
        assert all(map(torch.equal, params, before))
        assert all(param.grad is None for param in params)
        return str(error)
    return "nothing"
