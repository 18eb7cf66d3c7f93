"""The command line: ``amp-patch run script.py``. Imports no torch unless a level is named."""

from __future__ import annotations

import click

from amp_patch import __version__
from amp_patch.apex.process import real_amp, run_python


def _known_level(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    # Imported late, for that takes torch, which a run without --opt-level need not wait for.
    from amp_patch.levels import OPT_LEVELS

    if value not in OPT_LEVELS:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, OPT_LEVELS))}.")
    return value


@click.group()
@click.version_option(__version__, prog_name="amp-patch")
def main() -> None:
    """Mixed-precision training for PyTorch."""


# What follows the script is the script's, options of the same names included.
@main.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--opt-level",
    metavar="LEVEL",
    callback=_known_level,
    help="In place of the script's own level.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--force", is_flag=True, help="Put amp_patch in the place of a real apex, too.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    opt_level: str | None, is_module: bool, force: bool, script: str, args: tuple[str, ...]
) -> None:
    """Run a script that imports apex, as `python SCRIPT ARGS` would, with apex in place.

    The processes that it starts find apex, too.
    """
    place = None if force else real_amp()
    if place is not None:
        click.echo(
            f"amp-patch: the script uses the apex.amp in {place}, which --opt-level does not reach;"
            " call amp-patch run --force to put amp_patch in its place.",
            err=True,
        )
    try:
        run_python([*(["-m"] if is_module else []), script, *args], opt_level, force)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
