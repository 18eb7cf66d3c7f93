"""``amp-patch run script.py``: a script that imports apex, as Python would run it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from amp_patch.apex.process import real_amp, run_python
from amp_patch.casting.rules import PROFILES
from amp_patch.common.did_you_mean import did_you_mean
from amp_patch.common.rules_file import read

from . import options
from .errors import refuse_notebook
from .run_report import file_of_rank


def _profile_or_file(
    context: click.Context, param: click.Parameter, value: str | None
) -> str | None:
    """Refuse what is neither, and a file that says what no file may, before the script starts."""
    if value is None or value in PROFILES:
        return value
    if not Path(value).is_file():
        raise click.BadParameter(
            f"{value!r} is neither a profile ({', '.join(map(repr, PROFILES))}) nor a file"
            f"{did_you_mean(value, PROFILES)}"
        )
    try:
        read(value, options.LEVELS, PROFILES)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error)) from error
    return value


# What follows the script is the script's, options of the same names included.
@click.command(context_settings={"allow_interspersed_args": False})
@options.opt_level()
@click.option(
    "--rules",
    metavar="FILE",
    callback=_profile_or_file,
    help="A rules file, as amp-patch tune writes it, or the name of a profile, in place of the "
    "script's own rules.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write levels, steps, skipped steps and loss scales there, as JSON, when the script ends.",
)
@click.option("--force", is_flag=True, help="Put amp_patch in the place of a real apex, too.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    opt_level: str | None,
    rules: str | None,
    report: Path | None,
    is_module: bool,
    force: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a script that imports apex, as `python SCRIPT ARGS` would, with apex in place.

    The processes that it starts find apex, too. What stands after SCRIPT is the script's.
    SCRIPT may be a program that starts scripts: amp-patch run accelerate launch train.py

    \b
    amp-patch run train.py --epochs 10
    amp-patch run --opt-level O2 --report report.json train.py --epochs 10
    amp-patch run -m package.train
    torchrun --nproc_per_node 4 -m amp_patch run train.py
    """
    if not is_module:
        refuse_notebook(script)
    if report is not None:
        _prepare(report)
    place = None if force else real_amp()
    if place is not None:
        click.echo(
            f"amp-patch: the script uses the apex.amp in {place}, which --opt-level and --rules do"
            " not reach; call amp-patch run --force to put amp_patch in its place.",
            err=True,
        )
    try:
        file = None if report is None else str(report)
        run_python([*(["-m"] if is_module else []), script, *args], opt_level, force, rules, file)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


def _prepare(report: Path) -> None:
    """Remove the report of an earlier run; of several ranks each removes its own.

    Raises:
        BadArguments: the file could not be written.
    """
    options.file_to_write("--report", report)
    file_of_rank(report, int(os.environ.get("RANK", "0"))).unlink(missing_ok=True)
