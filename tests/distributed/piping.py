"""The small training in a pipeline: each rank has one stage of the model, or several."""

from __future__ import annotations

import warnings
from typing import Any

import rank_training as training
import torch
from rank_training import Trained
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from amp_patch import amp

MICRO_BATCHES = 4
#: A sum over micro-batches is averaged at the end, and must not overflow before.
OPTIONS = {"max_loss_scale": 2.0**11}
#: step -> the rank in whose gradients an inf is planted; -1: in the loss of one micro-batch.
PLANTS = {2: 0, 4: -1, 5: 1}
SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def stages_of(schedule: str, rank: int) -> dict[int, nn.Module]:
    """Return the stages that a rank of two has, by their number."""
    model = training.make_model()
    assert isinstance(model, nn.Sequential)
    if schedule == "interleaved":
        return {number: model[number : number + 1] for number in (rank, rank + 2)}
    return {rank: model[2:] if rank else model[:2]}


def make_schedule(schedule: str, stages: dict[int, nn.Module], loss_fn: Any) -> Any:
    """Return torch's schedule for the stages of this rank."""
    count = distributed.get_world_size() * len(stages)
    made = [
        PipelineStage(stage, number, count, torch.device("cpu")) for number, stage in stages.items()
    ]
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B(made, MICRO_BATCHES, loss_fn=loss_fn)
    return SINGLE[schedule](made[0], MICRO_BATCHES, loss_fn=loss_fn)


def train(schedule: str, level: str, steps: int, max_norm: float | None) -> Trained:
    """Train by a pipeline on two ranks; its result has the parameters of this rank's stages."""
    rank, everybody = distributed.get_rank(), distributed.group.WORLD
    stages = stages_of(schedule, rank)
    params = [param for stage in stages.values() for param in stage.parameters()]
    is_scaled = level in training.SCALED
    _, optimizer = amp.initialize(
        list(stages.values()),
        training.adamw(params),
        opt_level=level,
        verbosity=0,
        process_group=everybody,
        **({**training.SCALES, **OPTIONS} if is_scaled else {}),
    )

    def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).square().mean() * scale

    pipeline = make_schedule(schedule, stages, scaled_loss)
    norms, losses, held, skipped = [], [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, 0, 1)
        plant, of_each = PLANTS.get(step) if is_scaled else None, []
        if plant == -1:
            targets[training.BATCH // MICRO_BATCHES] = float("inf")  # the first of a micro-batch
        with amp.scale_loss(torch.ones(()), optimizer) as scale:
            given = (inputs,) if rank == 0 else ()
            pipeline.step(*given, target=targets if rank else None, losses=of_each)
            if plant == rank:
                training.plant(nn.ModuleList(stages.values()))
        if max_norm is not None:
            norm = amp.clip_grad_norm_(optimizer, max_norm, process_group=everybody)
            norms.append(norm.item())
        optimizer.step()
        losses.append(sum(loss.item() for loss in of_each) / MICRO_BATCHES / scale.item())
        held.append(amp.loss_scale())
        skipped.append(amp.step_was_skipped(optimizer))
    values = {
        name: value.float().clone()
        for stage in stages.values()
        for name, value in stage.state_dict().items()
    }
    amp.deactivate()
    return Trained(values, [], norms, losses, held, skipped, [])


def train_and_compare(
    schedule: str, levels: tuple[str, ...], steps: int, max_norm: float | None
) -> dict[str, tuple[Trained, Trained]]:
    """Return for each level what the pipeline trains here, and what this process trains alone."""
    found = {}
    for level in levels:
        is_scaled = level in training.SCALED
        infs, options = (PLANTS, OPTIONS) if is_scaled else ({}, {})
        alone = training.train("none", level, steps, infs, max_norm, **options)
        found[level] = train(schedule, level, steps, max_norm), alone
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
