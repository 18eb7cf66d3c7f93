"""Runs a script with the recorder in it, at one level after another, and reads what it wrote.

Knows how a run is started, watched and ended; nothing of what the records say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amp_patch.tools.crash import crash_reason
from amp_patch.tools.launch import ScriptRun

RECORDER = "amp_patch.tools.compare.recorder:start"
#: Added to the environment of a run that is compared with others.
REPEATABLE = {"PYTHONHASHSEED": "0", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}


class NoRecord(Exception):
    """A run left nothing to compare; the message says why."""


def record(
    command: Sequence[str],
    folder: Path,
    level: str | None,
    *,
    steps: int | None,
    seed: int = 0,
    skipped: Sequence[Sequence[int]] = (),
    rules: Path | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run a script once, and return what `recorder` saved, with ``error``: None or why it ended.

    Args:
        command: of `launch.python_command`.
        folder: of this run alone; it is made.
        level: takes the place of the script's; None leaves it to the rules.
        steps: the script is ended after so many; None lets it end by itself.
        seed: of all random numbers.
        skipped: see `recorder.Recorder`.
        rules: a rules file that takes the place of the script's rules.
        timeout: seconds; None waits.

    Raises:
        NoRecord: the script ended, or was ended, before any module of an initialized model ran.
    """
    folder.mkdir(parents=True)
    options = {
        "out": str(folder),
        "steps": steps,
        "seed": seed,
        "skipped": [list(one) for one in skipped],
    }
    environment = {**REPEATABLE, **({} if rules is None else {"AMP_PATCH_RULES": str(rules)})}
    log = folder / "log.txt"
    error = run_to_end(ScriptRun(command, RECORDER, options, log, level, environment), log, timeout)
    path = folder / "record-rank0.pt"
    if not path.exists():
        raise NoRecord(error or "no module of a model given to amp.initialize was called")
    found: dict[str, Any] = torch.load(path)
    return {**found, "error": error}


def run_to_end(run: ScriptRun, log: Path, timeout: float | None) -> str | None:
    """Wait for a run, and return why it failed; None where it did not.

    It is ended where this process is interrupted.
    """
    end = None if timeout is None else time.monotonic() + timeout
    try:
        while run.wait(0.2) is None:
            if end is not None and time.monotonic() > end:
                return f"took longer than {timeout:.0f} s"
    finally:
        if run.code is None:
            run.stop()
        run.close()
    if run.code == 0:
        return None
    return crash_reason(run.code or 0, log)
