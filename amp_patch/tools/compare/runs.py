"""Runs a script with the recorder in it, at one level after another, and reads what it wrote.

Knows how a run is started, watched and ended; nothing of what the records say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from amp_patch.tools import untrained
from amp_patch.tools.crash import last_lines
from amp_patch.tools.launch import ScriptRun, run_to_end

RECORDER = "amp_patch.tools.compare.recorder:start"
#: Added to the environment of a run that is compared with others.
REPEATABLE = {"PYTHONHASHSEED": "0", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}


class NoRecord(Exception):
    """A run left nothing to compare; the message says why.

    Attributes:
        is_futile: whether it is so at every level, for the script does not train with amp.
        last_lines: what a script that failed printed last.
    """

    def __init__(self, why: str, is_futile: bool, last_lines: str = "") -> None:
        super().__init__(why)
        self.is_futile, self.last_lines = is_futile, last_lines


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
        NoRecord: the script ended, or was ended, before any module of an initialized model ran; or
            it came to its end and stepped no optimizer.
    """
    folder.mkdir(parents=True)
    options = {
        "out": str(folder),
        "steps": steps,
        "seed": seed,
        "skipped": [list(one) for one in skipped],
    }
    environment = {**REPEATABLE, **({} if rules is None else {"AMP_PATCH_RULES": str(rules)})}
    run = ScriptRun(command, RECORDER, options, folder / "log.txt", level, environment)
    error = run_to_end(run, timeout)
    paths = sorted(folder.glob("record-rank*.pt"))
    records = [torch.load(path) for path in paths]
    if error is None and not any(one["steps"] for one in records):
        raise NoRecord(untrained.reason_in(folder), is_futile=True)
    if not records:
        assert error is not None
        raise NoRecord(error, is_futile=False, last_lines=last_lines(run.log))
    return {**together(records), "error": error}


def together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the first rank, with what was not finite on any.

    Returns:
        The record; ``ranks``: how many there are; ``alike``: whether all skipped the same steps.
    """
    first = dict(records[0])
    for name in ("nonfinite", "overflows", "buffers"):
        every = [one for record in records for one in record[name]]
        first[name] = [one for index, one in enumerate(every) if one not in every[:index]]
    seen = {(one["step"], one["parameter"]) for one in first["gradients"] if "overflow" in one}
    first["gradients"] = first["gradients"] + [
        one
        for record in records[1:]
        for one in record["gradients"]
        if "overflow" in one and (one["step"], one["parameter"]) not in seen
    ]
    alike = all(record["skipped"] == first["skipped"] for record in records)
    return {**first, "ranks": len(records), "alike": alike}
