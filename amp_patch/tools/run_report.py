"""``amp-patch run --report FILE``: what became of a run, as JSON; runs in the script's processes.

The file is written by the process that `amp-patch run` became, and by each process that trains.
Knows how a process begins and ends; imports no torch, for scripts that do not.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from amp_patch import __version__
from amp_patch.apex.process import REPORT, REPORT_PROCESS

from .at_end import at_end

#: Seconds from one writing to the next while a script trains: what is killed cannot write any more.
INTERVAL = 10.0


class Training(Protocol):
    """What a process has trained, once it has begun to."""

    rank: int
    world_size: int

    def sessions(self) -> list[dict[str, Any]]:
        """Return the summary of each session; empty where nothing was initialized."""


class Report:
    """The report of one process.

    Args:
        file: of rank 0.
        main: the process that ``amp-patch run`` became, which writes a report also where it does
            not train.
        since: seconds since the epoch when it did: what is older is of another run.

    Attributes:
        training: what it has trained; None until amp_patch is imported.
    """

    def __init__(self, file: Path, main: int, since: float) -> None:
        self._file, self._main, self._since = file, main, since
        self._process = os.getpid()
        self._command = sys.orig_argv[1:]
        self._began, self._clock = _now(), time.monotonic()
        self._path: Path | None = None
        self._due = 0.0
        self.training: Training | None = None

    def write_if_due(self) -> None:
        """Write how far the script has come, if it was not done lately."""
        if time.monotonic() >= self._due:
            self._write(ended=None)

    def end(self) -> None:
        """Write all of it; the process ends."""
        has_trained = self.training is not None and bool(self.training.sessions())
        is_alone = self._process == self._main and not self._is_taken(self._file)
        if os.getpid() == self._process and (has_trained or self._path or is_alone):
            self._write(ended=_now())

    def _write(self, ended: str | None) -> None:
        self._due = time.monotonic() + INTERVAL
        try:
            self._path = self._path or self._free()
            part = self._path.with_name(f".{self._path.name}.part")
            part.write_text(json.dumps(self._content(ended), indent=2) + "\n", encoding="utf-8")
            os.replace(part, self._path)
        except OSError as error:  # a full disk, a folder that is gone: the training goes on
            self._due = float("inf")
            print(f"amp-patch: no report in {self._file}: {error}", file=sys.stderr)

    def _free(self) -> Path:
        """Return a file that no other process of this run writes."""
        first = file_of_rank(self._file, 0 if self.training is None else self.training.rank)
        path = first
        for number in itertools.count(2):
            if not self._is_taken(path):
                break
            path = first.with_name(f"{first.stem}-{number}{first.suffix}")
        return path

    def _is_taken(self, path: Path) -> bool:
        return path.exists() and path.stat().st_mtime >= self._since

    def _content(self, ended: str | None) -> dict[str, Any]:
        training = self.training
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        torch = sys.modules.get("torch")
        return {
            "amp_patch": __version__,
            "torch": None if torch is None else str(torch.__version__),
            "command": self._command,
            "rank": 0 if training is None else training.rank,
            "world_size": 1 if training is None else training.world_size,
            "began": self._began,
            "ended": ended,
            "seconds": round(time.monotonic() - self._clock, 3),
            "exception": None if ended is None or error is None else _described(error),
            "sessions": [] if training is None else training.sessions(),
        }


def file_of_rank(file: Path, rank: int) -> Path:
    """Return where a rank writes: ``report.json``, ``report-rank1.json``, ..."""
    return file.with_name(f"{file.stem}-rank{rank}{file.suffix}") if rank else file


def start() -> None:
    """Begin; called when a process of ``amp-patch run --report`` starts."""
    main, since = os.environ[REPORT_PROCESS].split()
    report = Report(Path(os.environ[REPORT]), int(main), float(since))
    at_end(report.end)  # the first that is registered is the last that is called

    def follow(_: ModuleType) -> None:
        child = importlib.import_module("amp_patch.tools.run_report_child")
        report.training = child.follow(report.write_if_due)

    importlib.import_module("wrapt").register_post_import_hook(follow, "amp_patch.session")


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
