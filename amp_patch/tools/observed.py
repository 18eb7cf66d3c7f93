"""Runs a script to its end with a tool in it, for commands that show what the tool has found.

Knows how a run ends; what is observed and how it is shown are the commands' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from . import untrained
from .crash import last_lines
from .launch import (
    ScriptRun,
    exit_code_of,
    filled,
    python_command,
    run_to_end,
    temporary_folder,
)
from .recorded import read_lines


class Observed(NamedTuple):
    """What came of a run.

    Attributes:
        found: what the tool wrote, one object for each process that trained.
        error: why the script failed, or left nothing; "" where it did neither.
        code: the exit code for the command: 0, 1 after an error, else 128 and the signal's number.
        last_lines: what a script that failed printed last.
    """

    found: list[dict[str, Any]]
    error: str = ""
    code: int = 0
    last_lines: str = ""

    def with_words(self, words: str, others: str) -> Observed:
        """Return the same with others in the place of some words of the error."""
        error, last = (one.replace(words, others) for one in (self.error, self.last_lines))
        return self._replace(error=error, last_lines=last)

    def first(self) -> dict[str, Any]:
        """Return what the first process has found.

        Raises:
            ClickException, Exit: no process trained.
        """
        if self.found:
            return self.found[0]
        if self.code > 1:
            click.echo("Interrupted, before the script made a step with amp.", err=True)
            raise click.exceptions.Exit(self.code)
        raise self._failure()

    def end(self) -> None:
        """Say how the run ended, after what it has found, and end the command.

        Raises:
            ClickException, Exit: it did not end well.
        """
        if self.code > 1:
            click.echo("Interrupted: this is what was found until then.", err=True)
            raise click.exceptions.Exit(self.code)
        if self.error:
            raise self._failure()

    def _failure(self) -> click.ClickException:
        """Return the error, after what the script printed last: its traceback."""
        if self.last_lines:
            click.echo(f"The last lines of the script:\n{self.last_lines}", err=True)
        return click.ClickException(self.error)


def observe(
    tool: str, words: Sequence[str], options: Mapping[str, Any], opt_level: str | None
) -> Observed:
    """Run a script, and wait for its end. An interruption ends it, and what it wrote is kept.

    torch.compile is off in it, for what it compiled cannot be looked at.

    Args:
        tool: as `ScriptRun` takes it; it writes objects by ``child.Lines(out, "found")``, of which
            the last of each process counts.
        words: what stands after ``--``; {run} in it stands for the name of the tool, "stats".
        options: for the tool; "out" is added.
        opt_level: takes the place of the script's own; None leaves it.

    Raises:
        BadArguments: there is no such script.
    """
    command = python_command(words)
    with temporary_folder() as folder:
        options = {**options, "out": str(folder)}
        environment = {"TORCHDYNAMO_DISABLE": "1"}
        code, error, log = 0, None, folder / "log.txt"
        try:
            name = tool.partition(":")[0].rpartition(".")[2].removesuffix("_child")
            command = filled(command, opt_level or "own", name)
            run = ScriptRun(command, tool, options, log, opt_level, environment)
            error = run_to_end(run)
        except KeyboardInterrupt as interruption:
            code = exit_code_of(interruption)
        lines = [read_lines(path) for path in sorted(folder.glob("found-*.jsonl"))]
        found = [one[-1] for one in lines if one]
        if error is not None:
            return Observed(found, f"the script failed: {error}", 1, last_lines(log))
        if not found and not code:
            return Observed([], untrained.reason_in(folder), 1)
        return Observed(found, "", code)
