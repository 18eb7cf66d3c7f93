"""Trainings in which a rank fails in the middle of a step, and what the other ranks see of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import rank_training as training
import resuming
import torch
from torch import Tensor, distributed, nn

from amp_patch import amp

STEPS = 6
#: The step in which rank 1 fails.
FAILS_IN = 3
#: A checkpoint is saved after so many steps.
SAVES_EVERY = 2
#: In these the scale has moved for a step that is not made.
BEHIND_BLOCK = ("clip", "step")
#: How long a rank that stalls does so: the others must have given up by then.
STALLS = 8.0  # seconds


class Seen(NamedTuple):
    """What a rank that did not fail has seen.

    Attributes:
        steps: how many it made.
        error: what it got then; None if it made them all.
        is_whole: whether parameters and states are to the bit those of a training that nothing
            interrupts, after as many steps; and the loss scale after as many blocks.
    """

    steps: int
    error: str | None
    is_whole: bool


def die() -> None:
    """End this process as the system does that has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory() -> None:
    """Raise what a GPU does that has no memory left."""
    raise torch.OutOfMemoryError("a planted one")


def stall() -> None:
    """Do nothing for a while, as a rank does that waits for a disk."""
    time.sleep(STALLS)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: Callable[[int, str], None],
    begins_with: int = 0,
) -> list[float]:
    """Train, and return the loss of each step on this rank.

    Args:
        model, optimizer: as `resuming.prepare` returns them.
        at: called with the step and its part, before "forward", in the "backward", after it in the
            "block", before "clip" and "step", and when a step is "over".
        begins_with: the number of the first step.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    losses = []
    for step in range(begins_with, STEPS):
        optimizer.zero_grad()
        inputs, targets = training.rows(step, rank, size)
        at(step, "forward")
        outputs = model(inputs)
        outputs.register_hook(lambda grad, step=step: at(step, "backward"))
        loss = (outputs.float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            at(step, "block")
        at(step, "clip")
        amp.clip_grad_norm_(optimizer, 0.5)
        at(step, "step")
        optimizer.step()
        losses.append(loss.item())
        at(step, "over")
    return losses


def survive(engine: str, level: str, part: str, fail: Callable[[], None]) -> Seen:
    """Train while rank 1 fails in a part of a step, and return what this rank sees of that."""
    expected: list[list[Tensor]] = []
    model, optimizer = resuming.prepare(engine, level)
    expected.append(resuming.numbers(model, optimizer))

    def note(step: int, at: str) -> None:
        if at == "over":
            expected.append(resuming.numbers(model, optimizer))

    train(model, optimizer, note)
    amp.deactivate()
    made = 0

    def fail_on_rank_1(step: int, at: str) -> None:
        nonlocal made
        made += at == "over"
        if (step, at) == (FAILS_IN, part) and distributed.get_rank() == 1:
            fail()

    model, optimizer = resuming.prepare(engine, level)
    error = None
    try:
        train(model, optimizer, fail_on_rank_1)
    except RuntimeError as caught:
        if distributed.get_rank() == 1 and isinstance(caught, torch.OutOfMemoryError):
            raise
        error = str(caught)
    *found, scale = resuming.numbers(model, optimizer)
    *known, known_scale = expected[made]
    # Without a scale the block asks no other rank, and ends.
    is_behind = part in BEHIND_BLOCK or (part == "block" and level not in training.SCALED)
    if error is not None and is_behind and made == FAILS_IN:
        known_scale = expected[made + 1][-1]
    is_whole = len(found) == len(known) and all(map(torch.equal, found, known))
    amp.deactivate()
    return Seen(made, error, is_whole and torch.equal(scale, known_scale))


def go_on(engine: str, level: str, folder: str, fails: bool) -> tuple[list[float], list[Tensor]]:
    """Train from the last checkpoint of a folder, if it has one, and save others.

    Args:
        engine, level: as `resuming.prepare` takes them.
        folder: of checkpoints, for all ranks.
        fails: whether rank 1 dies in the middle of a step.

    Returns:
        The losses of the steps made here, and what `resuming.numbers` returns in the end.
    """
    model, optimizer = resuming.prepare(engine, level)
    first = 0
    # The file .metadata is written last: without it a checkpoint is not whole.
    saved = sorted(Path(folder).glob("*/.metadata"))
    if saved:
        resuming.load_state(str(saved[-1].parent), model, optimizer)
        first = int(saved[-1].parent.name)

    def at(step: int, part: str) -> None:
        if part == "over" and (step + 1) % SAVES_EVERY == 0:
            resuming.save_state(str(Path(folder, f"{step + 1:04}")), model, optimizer)
        if fails and (step, part) == (FAILS_IN, "backward") and distributed.get_rank() == 1:
            die()

    losses = train(model, optimizer, at, first)
    found = resuming.numbers(model, optimizer)
    amp.deactivate()
    return losses, found


def main() -> None:
    """Under ``torchrun --max-restarts``: fail the first time, and write what each rank has."""
    torch.set_num_threads(1)
    engine, level, folder = sys.argv[1:]
    distributed.init_process_group("gloo")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    found = go_on(engine, level, folder, is_first)
    torch.save(found, f"{folder}/rank{distributed.get_rank()}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
