"""Runs a script to its end with a tool in it, for commands that show what the tool has found.

Knows how a run ends; what is observed and how it is shown are the commands' own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from .crash import crash_reason
from .launch import ScriptRun, python_command

#: Seconds between two looks at the script.
_PAUSE = 0.5


class Observed(NamedTuple):
    """What came of a run.

    Attributes:
        found: what the tool wrote, one object for each process that trained.
        error: why the script failed; "" where it did not.
    """

    found: list[dict[str, Any]]
    error: str


def observe(
    tool: str, words: Sequence[str], options: Mapping[str, Any], opt_level: str | None
) -> Observed:
    """Run a script, and wait for its end.

    torch.compile is off in it, for what it compiled cannot be looked at.

    Args:
        tool: as `ScriptRun` takes it; it writes one object by ``child.Lines(out, "found")``.
        words: what stands after ``--``.
        options: for the tool; "out" is added.
        opt_level: takes the place of the script's own; None leaves it.

    Raises:
        BadArguments: there is no such script.
    """
    command = python_command(words)
    with tempfile.TemporaryDirectory(prefix="amp-patch-") as folder:
        log = Path(folder) / "log.txt"
        options = {**options, "out": folder}
        environment = {"TORCHDYNAMO_DISABLE": "1"}
        run = ScriptRun(command, tool, options, log, opt_level, environment)
        try:
            while (code := run.wait(_PAUSE)) is None:
                pass
        except KeyboardInterrupt:
            run.stop()
            raise click.Abort from None
        run.stop()
        files = sorted(Path(folder).glob("found-*.jsonl"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        error = (
            ""
            if code == 0
            else f"the script ended with exit code {code}: {crash_reason(code, log)}"
        )
        return Observed(found, error)


def first_of(observed: Observed) -> dict[str, Any]:
    """Return what the first process has found.

    Raises:
        ClickException: no process trained.
    """
    if observed.found:
        return observed.found[0]
    raise click.ClickException(
        observed.error
        or "the script did not train with amp_patch: it must call amp.initialize(), and make steps"
    )
