"""Notes, in the script's process, the loss of each step and when it ended, and nothing else."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip
from amp_patch.tools import child
from amp_patch.tools.at_end import at_end
from amp_patch.tools.buffer_looks import BufferLooks
from amp_patch.tools.optimizer_numbers import OptimizerNumbers
from amp_patch.tools.same_random import SameRandomNumbers
from amp_patch.tools.step_limit import StepLimit


def start(module: ModuleType) -> None:
    """Record this process; called with ``amp_patch.session``."""
    options = child.begin(module)
    lines = child.Lines(options["out"], "steps")
    if not options["timed"]:
        SameRandomNumbers().__enter__()
    observers = module.session.observers
    losses = Losses(lines)
    observers.attach(Clock(lines) if options["timed"] else losses)
    observers.attach(StepLimit(options["steps"] or 0, at_end=losses.look_at_buffers))


#: Steps and seconds after which the time of a step is known.
TIMED_STEPS, TIMED_SECONDS = 50, 20.0


class Clock(StepObserver):
    """Notes when each step ended, on the device as well; ends the script when that is enough.

    Ranks that train together do not end so, for each would do it by its own clock.

    Args:
        lines: gets a line for each step.
    """

    def __init__(self, lines: child.Lines) -> None:
        self._lines = lines
        self._moments: list[float] = []

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._lines.write({"time": now})
        self._moments.append(now)
        is_enough = len(self._moments) >= TIMED_STEPS and now - self._moments[0] >= TIMED_SECONDS
        if is_enough and child.is_alone():
            raise SystemExit(0)


class Losses(StepObserver):
    """Notes the loss of each step, a mean where several were scaled, and whether it was skipped.

    And buffers that are inf or NaN, see `tools.buffer_looks`.

    Args:
        lines: gets a line for each step.
    """

    def __init__(self, lines: child.Lines) -> None:
        self._lines, self._buffers = lines, BufferLooks(lines.write)
        self._numbers, self._has_stepped = OptimizerNumbers(), False
        self._waiting: weakref.WeakKeyDictionary[Optimizer, list[Tensor]]
        self._waiting = weakref.WeakKeyDictionary()

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver`."""
        self._buffers.follow(models)

    def scaled(
        self, loss: Tensor, scale: float | Tensor, scaler_id: int, optimizers: Sequence[Optimizer]
    ) -> None:
        """Keep the loss until the step."""
        for optimizer in optimizers:
            self._waiting.setdefault(optimizer, []).append(loss.detach().mean())

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        number = self._numbers.of(optimizer)
        values = [float(loss) for loss in self._waiting.pop(optimizer, [])]
        loss = sum(values) / len(values) if values else None
        self._lines.write({"optimizer": number, "loss": loss, "skipped": skip.was_skipped})
        self._buffers.step()
        if not self._has_stepped:
            self._has_stepped = True
            at_end(self._buffers.look_at_end)  # before the file is closed, which was opened now

    def look_at_buffers(self) -> None:
        """Note those that are inf or NaN when the script is ended."""
        self._buffers.look()
