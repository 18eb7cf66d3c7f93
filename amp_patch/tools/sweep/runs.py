"""Runs a script once a level and round, each in its own process, and keeps what they recorded."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from amp_patch.tools.launch import ScriptRun

from .outcomes import INTERRUPTED, TIMED_OUT, Outcome, Run, outcome_of
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
        interrupted: whether Ctrl-C or a signal ended the sweep.
    """

    settings: Settings
    command: Sequence[str]
    folder: Path
    view: View
    on_ended: Any = None
    interrupted: bool = False

    def run(self, kept: Sequence[Run] = ()) -> list[Run]:
        """Return a run for each level and round; those after an interruption are not begun.

        Args:
            kept: finished ones of an earlier sweep, which are not made again.
        """
        found = {(run.round, run.level): run for run in kept}
        runs = [found.get(key) or Run(key[1], key[0]) for key in self.settings.runs]
        with _signals_interrupt():
            for run in runs:
                if run in kept:
                    self.view.ended(run)
                elif not self.interrupted:
                    self.view.began(run)
                    self._make(run)
                    self.view.ended(run)
                    if self.on_ended is not None:
                        self.on_ended(runs)
        return runs

    def _make(self, run: Run) -> None:
        path = folder_of(self.folder, run)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        options = {
            "folder": str(path.resolve()),
            "steps": self.settings.steps,
            "seed": seed_of(self.settings, run),
        }
        start = time.monotonic()
        script = ScriptRun(self.command, TOOL, options, path / "log.txt", run.level)
        recordings = Folder(path)
        try:
            run.outcome = self._watch(run, script, recordings, path / "log.txt")
        except KeyboardInterrupt:
            self.interrupted = True
            run.outcome = Outcome(INTERRUPTED)
            _stop_at_once(script)
        finally:
            script.close()
        run.seconds = time.monotonic() - start
        take(run, recordings)

    def _watch(self, run: Run, script: ScriptRun, recordings: Folder, log: Path) -> Outcome:
        """Wait until the script ends, or has to be ended."""
        started = time.monotonic()
        ends = started + (self.settings.timeout or float("inf"))
        leaves = float("inf")
        while (code := script.wait(PAUSE)) is None:
            recording = first_rank(recordings.read())
            self.view.goes_on(run, recording)
            now = time.monotonic()
            if recording is not None and recording.done:
                leaves = min(leaves, now + LEAVE)
            if now > leaves:
                script.stop()
                break
            if now > ends:
                script.stop()
                return Outcome(TIMED_OUT, f"it was stopped after {self.settings.timeout:g} s")
        if code:
            script.stop()  # what it has started may live
        return outcome_of(code, log, first_rank(recordings.read()))


def take(run: Run, recordings: Folder) -> None:
    """Give a run what its processes recorded."""
    found = recordings.read()
    first = first_rank(found)
    if first is not None:
        run.steps, run.about = first.steps, first.about
    run.unlike_skips = unlike_skips(found)


def folder_of(folder: Path, run: Run) -> Path:
    """Return the folder of a run in that of the sweep."""
    return folder / "runs" / f"{run.level}-round{run.round}"


def seed_of(settings: Settings, run: Run) -> int:
    """Return the seed of a run: that of its round, the same for all levels."""
    return settings.seed + run.round - 1


def _stop_at_once(script: ScriptRun) -> None:
    """End a script; a second Ctrl-C does not let it live."""
    try:
        script.stop()
    except KeyboardInterrupt:
        script.kill()


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, do what Ctrl-C does.

    The script is in a process group of its own, which gets no such signal, and must not outlive us.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), _interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
