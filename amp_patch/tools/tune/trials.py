"""Runs a script at a setting, for its metric, its time or its errors, within a budget.

Knows processes and files of its own folder; nothing of what is searched for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_patch.tools import untrained
from amp_patch.tools.compare import runs
from amp_patch.tools.compare.comparison import Comparison, compare
from amp_patch.tools.launch import ScriptRun, filled, run_to_end
from amp_patch.tools.process import start_process
from amp_patch.tools.recorded import SPOILED, is_spoiled, read_lines
from amp_patch.tools.warm import WarmPython

from .outcome import Outcome, outcome_of_losses, outcome_of_output, over_ranks, progress
from .setting import Setting
from .speed import seconds_per_step

RECORDER = "amp_patch.tools.tune.recorder:start"
#: A run that takes as many times as long as fp32's hangs.
HANGS = 10
#: So many times a run of fp32 is kept back of the budget, to verify the file.
KEPT = 2


class OutOfBudget(Exception):
    """The time is over."""


@dataclass(frozen=True)
class Script:
    """What is run.

    Attributes:
        command: of `launch.python_command`.
        steps: it is ended after so many; None lets it end by itself.
        metric: None for the loss, else what finds a number in what is printed.
        seed: of all random numbers.
    """

    command: Sequence[str]
    steps: int | None
    metric: re.Pattern[str] | None = None
    seed: int = 0


class ScriptTrials:
    """Tries settings, each run in a process of its own.

    Args:
        script: what is run.
        folder: for files of the runs; there is one.
        budget: seconds from now; None for no end.
        warm: starts the runs but the first and the last, where these are the same so.
    """

    def __init__(
        self, script: Script, folder: Path, budget: float | None, warm: WarmPython | None = None
    ) -> None:
        self._warm = warm
        self._first: tuple[Setting | Path, Outcome] | None = None
        self._script, self._folder = script, folder
        self._end = None if budget is None else time.monotonic() + budget
        self._count, self._has_compared = 0, False
        self._longest: float | None = None
        self._keeps_a_run, self._spoils_in_fp32 = True, False
        self._steps: list[dict[str, Any]] = []

    def metric(self, setting: Setting | Path) -> Outcome:
        """Run at a setting, or with a rules file, and return the metric.

        Random numbers are drawn in fp32, so that dropout is the same at every level.

        Raises:
            OutOfBudget: the time was over before the run was.
        """
        outcome = self._metric(setting)
        if self._first is None:
            self._first = setting, outcome
        elif self._warm is not None and not self._has_compared:
            self._has_compared = True
            if self._first != (setting, outcome):
                self._warm = None  # whatever the reason, a script that does not repeat among them
                outcome = self._metric(setting)
        return outcome

    def _metric(self, setting: Setting | Path) -> Outcome:
        folder, error = self._run(setting, timed=False)
        lines = [read_lines(path) for path in _paths(folder)]
        self._steps = over_ranks([[one for one in rank if SPOILED not in one] for rank in lines])
        if self._script.metric is None:
            if not self._steps and error is None:
                error = untrained.reason_in(folder)
            spoiled = [one[SPOILED] for rank in lines for one in rank if SPOILED in one]
            return outcome_of_losses(self._steps, error or self._why_spoiled(setting, spoiled))
        text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        return outcome_of_output(text, self._script.metric, error)

    def _why_spoiled(self, setting: Setting | Path, spoiled: Sequence[str]) -> str | None:
        """Return why a run's buffers make it useless; None where fp32 spoils some, too."""
        if isinstance(setting, Setting) and setting.level == "O0":
            self._spoils_in_fp32 = bool(spoiled)
        return is_spoiled(spoiled[0]) if spoiled and not self._spoils_in_fp32 else None

    def seconds(self, setting: Setting) -> float | None:
        """Run at a setting as it is, and return the seconds of a step; None where that failed.

        Raises:
            OutOfBudget: the time was over before the run was.
        """
        folder, error = self._run(setting, timed=True)
        lines = read_lines(folder / "steps-rank0.jsonl")
        return None if error else seconds_per_step([line["time"] for line in lines])

    def progress(self) -> float | None:
        """Return by which share the loss changed in the last run; None for another metric."""
        return progress(self._steps) if self._script.metric is None else None

    def verify(self, rules: Path) -> Outcome:
        """Run with a file, for which time was kept back, and return the metric.

        Raises:
            OutOfBudget: the time was over before the run was.
        """
        self._keeps_a_run, self._warm = False, None
        return self.metric(rules)

    def errors(self, setting: Setting, steps: int) -> Comparison | None:
        """Compare the outputs of modules with fp32's; None where nothing was recorded.

        Raises:
            OutOfBudget: the time was over before the runs were.
        """
        try:
            one = self._record(setting, steps, [])
            reference = self._record(Setting("O0"), steps, one["skipped"])
        except runs.NoRecord:
            self._left()
            return None
        return compare(setting.level, one, reference, None)

    def _record(self, setting: Setting, steps: int, skipped: list[list[int]]) -> dict[str, Any]:
        rules, folder = self._rules(setting), self._next_folder()
        return runs.record(
            filled(self._script.command, setting.level, folder.name),
            folder,
            "",
            steps=steps,
            seed=self._script.seed,
            skipped=skipped,
            rules=rules,
            timeout=self._timeout(),
        )

    def _run(self, setting: Setting | Path, timed: bool) -> tuple[Path, str | None]:
        """Return the folder of a run, and why it failed."""
        rules = setting if isinstance(setting, Path) else self._rules(setting)
        folder = self._next_folder()
        folder.mkdir()
        options = {
            "out": str(folder),
            "steps": self._script.steps,
            "seed": self._script.seed,
            "timed": timed,
        }
        # absolute, for a script may change its folder
        environment = {"AMP_PATCH_RULES": str(rules.absolute())}
        environment |= {"PYTHONHASHSEED": "0"} if timed else runs.REPEATABLE
        timeout, begin = self._timeout(), time.monotonic()
        # The level is the file's, also where one was forced upon this process.
        command = filled(self._script.command, _level_of(setting), folder.name)
        start = self._warm.start if self._warm and self._first else start_process
        log = folder / "log.txt"
        run = ScriptRun(command, RECORDER, options, log, "", environment, start)
        error = run_to_end(run, timeout)
        self._left()
        if error is None and self._longest is None:
            self._longest = time.monotonic() - begin
        return folder, error

    def _rules(self, setting: Setting) -> Path:
        path = self._folder / f"{self._count}.toml"
        path.write_text(setting.toml(), encoding="utf-8")
        return path

    def _next_folder(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def _timeout(self) -> float | None:
        """Return the seconds that a run may take."""
        limits = [] if self._longest is None else [60 + HANGS * self._longest]
        left = self._left()
        return min([*limits, *([] if left is None else [left])], default=None)

    def _left(self) -> float | None:
        left = None if self._end is None else self._end - time.monotonic()
        if left is not None and self._keeps_a_run:
            left -= KEPT * (self._longest or 0.0)
        if left is not None and left <= 0:
            raise OutOfBudget
        return left


def _level_of(setting: Setting | Path) -> str:
    """Return the word that stands for ``{level}``; a file is named as such."""
    return setting.stem if isinstance(setting, Path) else setting.level


def _paths(folder: Path) -> list[Path]:
    """Return the files of steps, one for each rank: "steps-rank0-2" is of a second process."""
    return [path for path in sorted(folder.glob("steps-*")) if path.stem.count("-") == 1]
