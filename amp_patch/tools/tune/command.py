"""``amp-patch tune``: searches, shows progress, and writes the rules file, whatever ends it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from amp_patch.tools import options
from amp_patch.tools.errors import BadArguments
from amp_patch.tools.launch import exit_code_of, python_command, temporary_folder
from amp_patch.tools.warm import WarmPython

from . import explanation
from .search import Search, TooFar
from .trials import OutOfBudget, Script, ScriptTrials

ALL = ",".join(options.LEVELS)
BUDGET = "the budget was used up"
INTERRUPTED = "it was interrupted"
UNVERIFIED = "Not verified by a run: {}."
NOTHING = (
    "{} was not written: no setting of {} is known to keep the metric, and --levels leaves O0 out{}"
)


@options.script_command()
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    metavar="loss|REGEX",
    help="What is to stay as in fp32: the loss given to amp.scale_loss, its mean over the last "
    "tenth of the steps; or the last number that the script prints where this matches, such as "
    r"'accuracy: ([-+.\d]+|nan)'.",
)
@options.tolerance(
    "1%", "Largest difference of the metric from fp32's, as a share of it.", may_be_zero=False
)
@options.levels(ALL, "Those that compete. Without O0, fp32 is measured but cannot win.")
@options.steps("End each run after N steps. Default: when the script ends.", least=10)
@click.option(
    "--budget",
    type=options.Duration(),
    metavar="MINUTES",
    help="Take what is found when they are over.",
)
@options.seed("Of all random numbers.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="The rules file to write.",
)
def command(
    metric: str,
    tolerance: float,
    levels: list[str],
    steps: int | None,
    budget: float | None,
    seed: int,
    out: Path,
    script: tuple[str, ...],
) -> None:
    """Tune levels, rules and regions to a script: the fastest whose loss stays that of fp32.

    The script after -- is run many times, from the same seed. Ctrl-C, and the end of --budget,
    keep the best so far. The rules file that is written says for each line what was measured.

    In ARGS {run} stands for a name of the run.

        amp-patch tune --steps 100 --out rules.toml -- train.py --epochs 1
    """
    words = python_command(script)
    pattern = _pattern(metric)
    options.writable_folder(out.absolute().parent)
    call = f"amp-patch tune{_given(metric, tolerance, levels, steps)} -- {shlex.join(script)}"
    with temporary_folder() as folder, WarmPython({"PYTHONHASHSEED": "0"}) as warm:
        seconds = None if budget is None else 60 * budget
        trials = ScriptTrials(Script(words, steps, pattern, seed), folder, seconds, warm)
        search = Search(trials, levels, tolerance, click.echo)
        ended, interrupted = _run(search)
        if interrupted and search.reference.failure:
            click.echo("Interrupted, before fp32 was measured: nothing was found.", err=True)
            raise click.exceptions.Exit(interrupted)
        found = search.result()
        if found is None:
            _end_with_nothing(out, levels, ended, interrupted)
        if search.progress is not None and search.progress <= search.tolerance:
            click.echo(explanation.STANDSTILL.format(search.progress))
        out.write_text(explanation.text(call, search, found, ended), encoding="utf-8")
        verdict, code = (
            (UNVERIFIED.format(ended), interrupted)
            if interrupted
            else _verified(trials, search, out)
        )
    click.echo(f"{out}: {found.setting}. {verdict}")
    if ended is not None:
        click.echo(f"The search was not finished: {ended}. There may be something faster.")
    if code:
        raise click.exceptions.Exit(code)


def _run(search: Search) -> tuple[str | None, int]:
    """Search; return what ended it early, in words, and the exit code where a signal did."""
    try:
        search.run()
    except OutOfBudget:
        return BUDGET, 0
    except KeyboardInterrupt as interruption:
        return INTERRUPTED, exit_code_of(interruption)
    except TooFar as error:
        raise click.ClickException(str(error)) from error
    return None, 0


def _end_with_nothing(
    out: Path, levels: Sequence[str], ended: str | None, interrupted: int
) -> NoReturn:
    """Say that there is nothing to write, and end the command."""
    why = "" if ended is None else f"; the search was not finished: {ended}"
    click.echo(NOTHING.format(out, " and ".join(levels), why), err=True)
    raise click.exceptions.Exit(interrupted or 1)


def _verified(trials: ScriptTrials, search: Search, out: Path) -> tuple[str, int]:
    """Run with the file, and return what that says, and the exit code."""
    try:
        outcome = trials.verify(out)
    except OutOfBudget:
        return UNVERIFIED.format(BUDGET), 0
    except KeyboardInterrupt as interruption:
        return UNVERIFIED.format(INTERRUPTED), exit_code_of(interruption)
    words = search.deviation_words(outcome)
    if outcome.failure:
        return f"A run with it failed: {words}.", 1
    if search.within(outcome):
        return f"Verified by a run with it: {words}.", 0
    return f"A run with it is out of tolerance: {words}.", 1


def _pattern(metric: str) -> re.Pattern[str] | None:
    """Return what finds the metric in what a script prints; None for the loss."""
    if metric == "loss":
        return None
    try:
        pattern = re.compile(metric, re.MULTILINE)
    except re.error as error:
        raise BadArguments(
            f"--metric must be loss or a regular expression; got {metric!r}: {error}"
        ) from error
    if pattern.groups > 1:
        raise BadArguments(f"--metric must have one group, around the number; got {metric!r}")
    return pattern


def _given(metric: str, tolerance: float, levels: Sequence[str], steps: int | None) -> str:
    """Return the options that decide what is found, as they would be typed."""
    words = ["", "--metric", shlex.quote(metric), "--tolerance", f"{tolerance:g}"]
    words += [] if ",".join(levels) == ALL else ["--levels", ",".join(levels)]
    words += [] if steps is None else ["--steps", str(steps)]
    return " ".join(words)
