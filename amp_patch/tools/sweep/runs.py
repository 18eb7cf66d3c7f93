"""Runs a script once a level and round, each in its own process, and keeps what they recorded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from amp_patch.tools.launch import ScriptRun, exit_code_of, filled
from amp_patch.tools.options import SEEDS
from amp_patch.tools.untrained import is_to_end, notice, reason_after

from .outcomes import INTERRUPTED, NO_STEPS, TIMED_OUT, Outcome, Run, outcome_of
from .settings import Settings
from .steps import Folder, Recording, first_rank, unlike_skips

TOOL = "amp_patch.tools.sweep.recorder:start"
#: Seconds between two looks at a run.
PAUSE = 0.25
#: Seconds that a script gets to end after its last step was made.
LEAVE = 10.0


class View(Protocol):
    """Shows the runs as they go."""

    def began(self, run: Run) -> None:
        """A run begins."""

    def goes_on(self, run: Run, recording: Recording | None) -> None:
        """It has recorded so much by now."""

    def note(self, line: str) -> None:
        """Something is to be said of it while it runs; the same once only."""

    def ended(self, run: Run) -> None:
        """A run has ended; also told of those that are kept from an earlier sweep."""


@dataclass
class Runner:
    """Makes the runs of a sweep.

    Attributes:
        settings: what to run.
        command: what starts Python with the script.
        folder: of the sweep; each run gets a folder in it.
        view: told of each run.
        on_ended: called after each run with all of them, those to come included.
        interrupted: the exit code where Ctrl-C or a signal ended the sweep, else 0.
        is_futile: whether the sweep was ended, for the script does not train with amp at any level.
    """

    settings: Settings
    command: Sequence[str]
    folder: Path
    view: View
    on_ended: Any = None
    interrupted: int = 0
    is_futile: bool = False

    def run(self, kept: Sequence[Run] = ()) -> list[Run]:
        """Return a run for each level and round; those after the sweep was ended are not begun.

        Args:
            kept: finished ones of an earlier sweep, which are not made again.
        """
        found = {(run.round, run.level): run for run in kept}
        runs = [found.get(key) or Run(key[1], key[0]) for key in self.settings.runs]
        for run in runs:
            if run in kept:
                self.view.ended(run)
            elif not (self.interrupted or self.is_futile):
                self.view.began(run)
                self._make(run)
                # Where another run trained, this one may have found a checkpoint of its end.
                self.is_futile = not any(one.steps for one in runs) and run.outcome.kind == NO_STEPS
                self.view.ended(run)
                if self.on_ended is not None:
                    self.on_ended(runs)
        return runs

    def _make(self, run: Run) -> None:
        path = folder_of(self.folder, run)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        options = {
            "out": str(path.resolve()),
            "steps": self.settings.steps,
            "seed": seed_of(self.settings, run),
        }
        command = filled(self.command, run.level, path.name)
        start = time.monotonic()
        try:
            script = ScriptRun(command, TOOL, options, path / "log.txt", run.level)
            with script:
                run.outcome = self._watch(run, script, Folder(path), path / "log.txt")
        except KeyboardInterrupt as interruption:
            self.interrupted = exit_code_of(interruption)
            run.outcome = Outcome(INTERRUPTED)
        run.seconds = time.monotonic() - start
        take(run, Folder(path))

    def _watch(self, run: Run, script: ScriptRun, recordings: Folder, log: Path) -> Outcome:
        """Wait until the script ends, or has to be ended."""
        started = time.monotonic()
        ends = started + (self.settings.timeout or float("inf"))
        leaves = float("inf")
        while (code := script.wait(PAUSE)) is None:
            recording = first_rank(recordings.read())
            self.view.goes_on(run, recording)
            if steps := script.steps_without_amp():
                if is_to_end(steps):
                    script.stop()
                    return Outcome(NO_STEPS, reason_after(steps))
                self.view.note(notice(steps))
            now = time.monotonic()
            if recording is not None and recording.done:
                leaves = min(leaves, now + LEAVE)
            if now > leaves:
                script.stop()
                break
            if now > ends:
                script.stop()
                return Outcome(TIMED_OUT, f"it was stopped after {self.settings.timeout:g} s")
        return outcome_of(code, log, first_rank(recordings.read()))


def take(run: Run, recordings: Folder) -> None:
    """Give a run what its processes recorded."""
    found = recordings.read()
    first = first_rank(found)
    if first is not None:
        run.steps, run.about = first.steps, first.about
    run.spoiled = [title for one in found.values() for title in one.spoiled]
    run.unlike_skips = unlike_skips(found)


def folder_of(folder: Path, run: Run) -> Path:
    """Return the folder of a run in that of the sweep."""
    return folder / "runs" / f"{run.level}-round{run.round}"


def seed_of(settings: Settings, run: Run) -> int:
    """Return the seed of a run: that of its round, the same for all levels.

    After the largest seed comes 0.
    """
    return (settings.seed + run.round - 1) % SEEDS
