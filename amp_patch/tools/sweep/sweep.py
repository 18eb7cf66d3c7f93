"""One sweep from its options to its files: runs them, compares, prints and writes."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_patch.tools.errors import BadArguments
from amp_patch.tools.options import writable_folder
from amp_patch.tools.rich_parts import Console

from . import files, live, tables
from .comparison import Comparison, compared
from .folder_lock import FolderLock
from .outcomes import CRASHED, Run
from .recommendation import Recommendation, recommend
from .runs import Runner, folder_of
from .settings import Settings


@dataclass
class Sweep:
    """A sweep that is ready to run.

    Attributes:
        settings: its options.
        folder: where all files go.
        command: what starts Python with the script.
        started: when it first began, as ISO 8601 has it.
        kept: finished runs that need not be made again.
        lock: keeps other sweeps out of the folder.
    """

    settings: Settings
    folder: Path
    command: Sequence[str]
    started: str = field(default_factory=lambda: _now())
    kept: Sequence[Run] = ()
    lock: FolderLock | None = None

    def run(self, console: Console | None = None) -> Result:
        """Make the runs, write the files, and print the comparison; then let go of the folder.

        Args:
            console: where to print; the standard output if None.
        """
        try:
            # what a script prints, and folders, may have brackets in them
            return self._run(console or Console(markup=False, emoji=False))
        finally:
            self.lock = None

    def _run(self, console: Console) -> Result:
        self._save([Run(level, number) for number, level in self.settings.runs])
        with live.view_for(console, self.settings) as view:
            runner = Runner(self.settings, self.command, self.folder, view, self._save)
            runs = runner.run(self.kept)
        comparison, recommendation = self._save(runs)
        # First, for no full disk is to keep what hours of runs have found.
        tables.show(console, comparison, recommendation)
        files.write_levels(self.folder, comparison)
        markdown = tables.as_markdown(comparison)
        (self.folder / "levels.md").write_text(markdown, encoding="utf-8")
        files.write_steps(self.folder, runs, comparison.warm_up)
        self._draw(comparison, recommendation, runs)
        console.print(f"Report: {self.folder / 'report.html'}", soft_wrap=True, highlight=False)
        failed = next((run for run in runs if run.outcome.kind == CRASHED), None)
        if failed is not None:
            log = folder_of(self.folder, failed) / "log.txt"
            words = f"{failed.level} crashed. Its output: {log}"
            console.print(words, soft_wrap=True, highlight=False)
        if runner.is_futile:
            console.print("No other level was run.")
        if runner.interrupted:
            resume = self.settings.goes_on_by(self.folder)
            console.print(f"Interrupted. To go on: {resume}", soft_wrap=True, highlight=False)
        return Result(comparison, recommendation, self.folder, runs, runner.interrupted)

    def _save(self, runs: Sequence[Run]) -> tuple[Comparison, Recommendation]:
        comparison = compared(runs, self.settings.tolerance)
        recommendation = recommend(comparison)
        files.save(self.folder, self.settings, self.started, runs, comparison, recommendation)
        return comparison, recommendation

    def _draw(
        self, comparison: Comparison, recommendation: Recommendation, runs: Sequence[Run]
    ) -> None:
        # Imported late: the libraries that draw take a second, and no run needs them.
        report = importlib.import_module("amp_patch.tools.sweep.report")
        report.write(self.folder, self.settings, self.started, comparison, recommendation, runs)
        _plots().write(self.folder, comparison, runs, self.settings.tolerance)


@dataclass(frozen=True)
class Result:
    """What a sweep found.

    Attributes:
        comparison: the figures and verdict of each level.
        recommendation: which level to train at.
        folder: where the files are.
        runs: each run, with its steps.
        interrupted: the exit code where Ctrl-C or a signal ended it, else 0.
    """

    comparison: Comparison
    recommendation: Recommendation
    folder: Path
    runs: Sequence[Run]
    interrupted: int

    def __repr__(self) -> str:
        """Leave out the steps of the runs: a notebook shows what a cell ends with."""
        verdicts = ", ".join(f"{row.level} {row.verdict.short}" for row in self.comparison.rows)
        return (
            f"<Result of a sweep: {verdicts}; recommended: {self.recommendation.level}; files in "
            f"{self.folder}>"
        )

    @property
    def exit_code(self) -> int:
        """0; 1 where no run came to its end; 130 after Ctrl-C, or 128 and a signal's number."""
        if self.interrupted:
            return self.interrupted
        return 0 if any(run.is_finished for run in self.runs) else 1


def begun(out: Path | None, settings: Settings, command: Sequence[str]) -> Sweep:
    """Return a new sweep.

    Raises:
        BadArguments: ``out`` cannot be written to, or holds a sweep, or one that begins just now.
    """
    folder = writable_folder(_free_folder() if out is None else out)
    if (folder / files.NAME).exists():
        raise BadArguments(
            f"the folder of a new sweep must not hold one; got {folder}, which does; call "
            f"{settings.goes_on_by(folder)} to go on with that, or name another folder"
        )
    return Sweep(settings, folder, command, lock=FolderLock(folder))


def resumed(
    folder: Path,
    options: Mapping[str, Any],
    command_of: Callable[[Settings, Path], Sequence[str]],
) -> Sweep:
    """Return a sweep that goes on.

    Args:
        folder: of the sweep.
        options: of `Settings`, which take the place of its own.
        command_of: returns what starts Python, from the settings and the folder of the sweep.

    Raises:
        BadArguments: ``folder`` holds no sweep, or one that cannot go on so, or is going on.
    """
    lock = FolderLock(folder)
    settings, started, runs = files.load(folder)
    command = command_of(settings, folder)
    settings = settings.resumed(options, [(run.round, run.level) for run in runs])
    return Sweep(settings, writable_folder(folder), command, started, runs, lock)


def _free_folder() -> Path:
    """Make a folder that is there for nobody else, who may begin a sweep at the same time."""
    folder, number = Path("amp-sweep"), 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = Path(f"amp-sweep-{number}")
            continue
        except OSError:  # which `writable_folder` tells
            pass
        return folder


def _plots() -> Any:
    """Import what draws, without the folders that matplotlib makes in the home directory."""
    if "matplotlib" in sys.modules or "MPLCONFIGDIR" in os.environ:
        return importlib.import_module("amp_patch.tools.sweep.plots")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            return importlib.import_module("amp_patch.tools.sweep.plots")
        finally:
            del os.environ["MPLCONFIGDIR"]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
