"""Counts the operators of a script, in the script's process; see `stats`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from amp_patch.debug.op_stats import Counting, OpStats
from amp_patch.debug.spoiled_buffers import SpoiledBuffers
from amp_patch.session import session
from amp_patch.step.observers import StepObserver

from . import child
from .at_end import at_end
from .step_limit import StepLimit


class StatsRecorder(StepObserver):
    """Counts from the first `amp.initialize` on.

    Args:
        out: the folder to write to.
        steps: after which the script is ended; 0 for none.
    """

    def __init__(self, out: str, steps: int) -> None:
        self._lines = child.Lines(out, "found")
        self._stats = OpStats()
        self._counting = Counting(self._stats)
        self._buffers = SpoiledBuffers()
        self._spoiled: dict[Hashable, dict[str, Any]] = {}
        self._models: Sequence[nn.Module] = ()  # a script's function ends before the process
        self._blocks = contextlib.ExitStack()
        self._has_begun = self._has_ended = False
        self._thread = threading.get_ident()
        self.limit = StepLimit(steps, self.end)

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver`."""
        self._counting.forget_places()
        self._buffers.follow(models)
        self._models = models or self._models
        if not self._has_begun:
            self._has_begun, self._thread = True, threading.get_ident()
            self._blocks.enter_context(self._counting.of_steps())
            self._blocks.enter_context(self._counting)
            at_end(self.end)

    def leaving(self) -> None:
        """Note buffers while they are as the level has them."""
        self._spoiled |= {one[:3]: one.to_json() for one in self._buffers.found()}
        self._buffers = SpoiledBuffers()

    def end(self) -> None:
        """Write what was counted, once."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._thread == threading.get_ident():  # another one has not entered the blocks
            self._blocks.close()
        if self._stats.steps or self.limit.steps:
            self.leaving()
            self._lines.write({**self._stats.to_json(), "buffers": list(self._spoiled.values())})


def start(module: ModuleType) -> None:
    """Begin; called when the script has imported amp_patch."""
    options = child.begin(module)
    recorder = StatsRecorder(options["out"], options["steps"])
    session.observers.attach(recorder)
    session.observers.attach(recorder.limit)
