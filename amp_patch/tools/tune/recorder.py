"""Notes, in the script's process, the loss of each step and when it ended, and nothing else."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip
from amp_patch.tools import child
from amp_patch.tools.optimizer_numbers import OptimizerNumbers
from amp_patch.tools.same_random import SameRandomNumbers


def start(module: ModuleType) -> None:
    """Record this process; called with ``amp_patch.session``."""
    options = child.begin(module)
    child.seed_everything(options["seed"])
    lines = child.Lines(options["out"], "steps")
    if options["timed"]:
        module.session.observers.attach(Clock(lines, options["steps"]))
    else:
        SameRandomNumbers().__enter__()
        module.session.observers.attach(Losses(lines, options["steps"]))


class _Recorder(StepObserver):
    """Counts steps, and ends the script after enough of them.

    Args:
        lines: gets one for each step.
        steps: None lets the script end by itself.
    """

    def __init__(self, lines: child.Lines, steps: int | None) -> None:
        self._lines, self._steps = lines, steps
        self._count = 0

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """Write what is known of the step."""
        self._lines.write(self._line(optimizer, skip))
        self._count += 1
        if self._steps is not None and self._count >= self._steps:
            raise SystemExit(0)

    def _line(self, optimizer: Optimizer, skip: Skip) -> dict[str, Any]:
        raise NotImplementedError


class Clock(_Recorder):
    """Notes when each step ended, on the device as well."""

    def _line(self, optimizer: Optimizer, skip: Skip) -> dict[str, Any]:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return {"time": time.perf_counter()}


class Losses(_Recorder):
    """Notes the loss of each step, a mean where several were scaled, and whether it was skipped."""

    def __init__(self, lines: child.Lines, steps: int | None) -> None:
        super().__init__(lines, steps)
        self._numbers = OptimizerNumbers()
        self._waiting: weakref.WeakKeyDictionary[Optimizer, list[Tensor]]
        self._waiting = weakref.WeakKeyDictionary()

    def scaled(
        self, loss: Tensor, scale: float | Tensor, scaler_id: int, optimizers: Sequence[Optimizer]
    ) -> None:
        """Keep the loss until the step."""
        for optimizer in optimizers:
            self._waiting.setdefault(optimizer, []).append(loss.detach().mean())

    def _line(self, optimizer: Optimizer, skip: Skip) -> dict[str, Any]:
        number = self._numbers.of(optimizer)
        values = [float(loss) for loss in self._waiting.pop(optimizer, [])]
        loss = sum(values) / len(values) if values else None
        return {"optimizer": number, "loss": loss, "skipped": skip.was_skipped}
