"""What is shown while a sweep runs: a table that changes, or a few lines where none can."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from amp_patch.tools.rich_parts import Console, Live, Table, Text, box

from . import wording
from .outcomes import FINISHED, Run
from .settings import Settings
from .steps import Recording, Step
from .tables import width_of

#: Seconds between two lines of one run, where there is no terminal.
SELDOM = 30.0
#: The columns of figures, those that can be spared last.
_FIGURES = ("step", "loss", "steps/s", "scale", "skipped")
#: How many of the last steps the speed is shown of.
RECENT = 50


def view_for(console: Console, settings: Settings) -> Lines | LiveTable:
    """Return what suits the console."""
    return LiveTable(console, settings) if console.is_terminal else Lines(console, settings)


class Notes:
    """Lines about runs, each printed once, whatever else is shown."""

    def __init__(self, console: Console) -> None:
        self._console, self._noted = console, set[str]()

    def note(self, line: str) -> None:
        """See `runs.View`."""
        if line not in self._noted:
            self._console.print(line, highlight=False, markup=False)
        self._noted.add(line)


class Lines(Notes):
    """A line when a run begins, one when it ends, and one now and then between."""

    def __init__(self, console: Console, settings: Settings) -> None:
        super().__init__(console)
        self._count, self._number = len(settings.runs), 0
        self._spoken, self._has_begun, self._last = 0.0, False, ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def began(self, run: Run) -> None:
        """See `runs.View`."""
        self._number += 1
        self._has_begun = True
        self._spoken = time.monotonic()
        self._say(f"[{self._number}/{self._count}] {named(run)} begins")

    def goes_on(self, run: Run, recording: Recording | None) -> None:
        """See `runs.View`."""
        if recording is not None and time.monotonic() - self._spoken > SELDOM:
            self._spoken = time.monotonic()
            words = progress(recording.steps, running_loss(recording.steps))
            self._say(f"  {named(run)}: {words}")

    def ended(self, run: Run) -> None:
        """See `runs.View`."""
        self._number += not self._has_begun
        self._has_begun = False
        words = progress(run.steps, run.final_loss)
        if run.outcome.kind != FINISHED:
            words = f"{run.outcome.kind}: {run.outcome.reason or words}"
        self._say(f"  {named(run)}: {words}")

    def _say(self, line: str) -> None:
        """Print a line, unless it is the one printed last: a run's end adds nothing to it."""
        if line != self._last:
            self._console.print(line, highlight=False, markup=False)
        self._last = line


class LiveTable(Notes):
    """A row for each level that changes while it runs."""

    def __init__(self, console: Console, settings: Settings) -> None:
        super().__init__(console)
        self._settings = settings
        self._states = dict.fromkeys(settings.levels, "waits")
        self._steps: dict[str, Sequence[Step]] = {level: [] for level in settings.levels}
        self._losses: dict[str, float | None] = {}
        self._live = Live(self._table(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def began(self, run: Run) -> None:
        """See `runs.View`."""
        self._show(run, "starts", [], None)

    def goes_on(self, run: Run, recording: Recording | None) -> None:
        """See `runs.View`."""
        if recording is not None:
            self._show(run, "runs", recording.steps, running_loss(recording.steps))

    def ended(self, run: Run) -> None:
        """See `runs.View`."""
        self._show(run, run.outcome.kind, run.steps, run.final_loss)

    def _show(self, run: Run, state: str, steps: Sequence[Step], loss: float | None) -> None:
        rounds = self._settings.repeat
        self._states[run.level] = f"{state} {run.round}/{rounds}" if rounds > 1 else state
        self._steps[run.level], self._losses[run.level] = steps, loss
        self._live.update(self._table())

    def _table(self) -> Table:
        """Return the table without those of its last columns that the width has no room for."""
        for count in range(len(_FIGURES), 0, -1):
            table = self._first_columns(count)
            if width_of(self._console, table) <= self._console.width:
                break
        return table

    def _first_columns(self, count: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column("level", no_wrap=True)
        table.add_column("state", no_wrap=True)
        for name in _FIGURES[:count]:
            table.add_column(name, justify="right", no_wrap=True)
        for level, state in self._states.items():
            figures = self._figures(self._steps[level], self._losses.get(level))
            table.add_row(level, _coloured(state), *figures[:count])
        return table

    def _figures(self, steps: Sequence[Step], loss: float | None) -> list[str]:
        most = self._settings.steps
        if not steps:
            return ["", "", "", "", ""]
        return [
            f"{len(steps)}/{most}" if most else str(len(steps)),
            wording.loss(loss),
            wording.rate(recent_seconds(steps)),
            wording.scale(steps[-1].scale),
            str(sum(step.skipped for step in steps)),
        ]


def named(run: Run) -> str:
    """Return a run's level, and its round after the first."""
    return run.level if run.round == 1 else f"{run.level}, round {run.round}"


def progress(steps: Sequence[Step], loss: float | None) -> str:
    """Say how far a run has come, and with which loss."""
    if not steps:
        return "no step yet"
    skipped = sum(step.skipped for step in steps)
    parts = [
        f"{len(steps)} step{'s' * (len(steps) != 1)}",
        f"loss {wording.loss(loss)}",
        f"{wording.rate(recent_seconds(steps))} steps/s",
        f"scale {wording.scale(steps[-1].scale)}",
        f"{skipped} skipped",
    ]
    return ", ".join(parts)


def running_loss(steps: Sequence[Step]) -> float | None:
    """Return the mean loss of the last steps; None where none had a loss."""
    losses = [step.loss for step in steps[-RECENT:] if step.loss is not None]
    return sum(losses) / len(losses) if losses else None


def recent_seconds(steps: Sequence[Step]) -> float | None:
    """Return the mean time of the last steps, the first of all left out."""
    times = [step.seconds for step in steps[1:][-RECENT:] if not step.counted]
    return sum(times) / len(times) if times else None


def _coloured(state: str) -> Text:
    word = state.split()[0]
    styles = {"waits": "dim", "starts": "bold", "runs": "bold", FINISHED: "green"}
    return Text(state, style=styles.get(word, "red"))
