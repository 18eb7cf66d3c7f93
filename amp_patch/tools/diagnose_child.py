"""Traces the overflows of a script, in the script's process; see `diagnose`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch.debug.trace import LastPass, tracer
from amp_patch.distributed.shards import local
from amp_patch.levels import HALVES
from amp_patch.session import session
from amp_patch.step.given_gradients import NOT_CLEARED
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

from . import child
from .at_end import at_end
from .step_limit import StepLimit


class DiagnoseRecorder(StepObserver):
    """Traces all models from the first `amp.initialize` on, also after `amp.deactivate`.

    Args:
        out: the folder to write to.
        steps: after which the script is ended; 0 for none.
    """

    def __init__(self, out: str, steps: int) -> None:
        self._lines = child.Lines(out, "found")
        self._overflows = self._steps = self._overflowed = self._known = self._uncleared = 0
        self._causes: list[dict[str, Any]] = []
        self._first: dict[Hashable, int] = {}  # cause -> the step that it first came up in
        self._last: dict[Optimizer, LastPass] = {}
        self._near_limits: dict[str, Any] = {}
        self._of_loss: dict[str, Any] | None = None
        self._hidden: dict[Hashable, dict[str, Any]] = {}
        self._infinite_state: Counter[str] = Counter()
        self._buffers: dict[Hashable, dict[str, Any]] = {}
        self._flushed_at: float | None = None
        self._has_ended = False
        self.limit = StepLimit(steps, self._survey)

    def prepared(self, models: Sequence[nn.Module]) -> None:
        """See `StepObserver`."""
        tracer.start(models, tells=False)
        session.call_at_deactivate(self._take_over)
        at_end(self._write)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """Count, and keep what is looked at if this was the last step."""
        before, self._known = self._known, self._overflows + tracer.overflows
        self._overflowed += self._known > before
        self._uncleared += self._known == before and skip.reason == NOT_CLEARED
        self._steps += 1
        self._note_causes(self._steps)
        self._last[optimizer] = tracer.last_pass()

    def leaving(self) -> None:
        """See `StepObserver`."""
        self._survey()

    def _note_causes(self, step: int) -> None:
        """Note the causes that no step before has shown."""
        for key in tracer.causes:
            self._first.setdefault(key, step)

    def _take_over(self) -> None:
        """Take what the tracer has found, which forgets it when the session ends."""
        self._overflows += tracer.overflows
        self._note_causes(self._steps + 1)  # of a step that an error, or the end, came before
        first, self._first = self._first, {}
        self._causes += [
            {**cause.to_json(), "count": count, "first_step": first[key], "text": str(cause)}
            for key, (cause, count) in zip(tracer.causes, tracer.told(), strict=True)
        ]

    def _survey(self) -> None:
        """Count what was near the limits in the last step of each optimizer."""
        self._buffers |= {one[:3]: one.to_json() for one in tracer.buffers.found()}
        last, self._last = self._last, {}
        for optimizer, one in last.items():
            # Whatever ended the script (an interrupted forward, a device that failed) may keep its
            # models from running once more.
            with contextlib.suppress(Exception):
                self._infinite_state += _infinite_state(optimizer)
                found = tracer.survey(one)
                if found.of_loss.flushed:
                    self._of_loss = dataclasses.asdict(found.of_loss)
                for name, counts in found.counts.items():
                    self._near_limits[name] = dataclasses.asdict(counts)
                if any(counts.are_lost for counts in (found.of_loss, *found.counts.values())):
                    self._flushed_at = one.scale
                for cause in found.hidden:
                    self._hidden[cause.key] = {**cause.to_json(), "text": str(cause)}

    def _write(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._take_over()
        if self.limit.steps:
            self._write_found()  # first, for who has asked the script to end may lose patience
            self._survey()
            self._write_found()

    def _write_found(self) -> None:
        found: dict[str, Any] = {"steps": self._steps, "overflowed_steps": self._overflowed}
        found |= {"was_ended": self.limit.has_ended, "uncleared_steps": self._uncleared}
        found |= {"overflows": self._overflows, "causes": self._causes}
        found |= {"near_limits": self._near_limits, "hidden": list(self._hidden.values())}
        found |= {"infinite_state": self._infinite_state, "flushed_at": self._flushed_at}
        found |= {"near_limits_of_loss": self._of_loss, "buffers": list(self._buffers.values())}
        self._lines.write(found)


def _infinite_state(optimizer: Optimizer) -> Counter[str]:
    """Return how many numbers of an optimizer's half state are inf, by what it calls the state."""
    counts: Counter[str] = Counter()
    for state in optimizer.state.values():
        if not isinstance(state, Mapping):  # some optimizers count their steps beside
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALVES:
                counts[f"{type(optimizer).__name__}'s {name}"] += int(local(value).isinf().sum())
    return counts


def start(module: ModuleType) -> None:
    """Begin; called when the script has imported amp_patch."""
    options = child.begin(module)
    tracer.lines.__enter__()
    recorder = DiagnoseRecorder(options["out"], options["steps"])
    session.observers.attach(recorder)
    session.observers.attach(recorder.limit)
