"""``amp-patch run script.py``: a script that imports apex, as Python would run it."""

from __future__ import annotations

import click

from amp_patch.apex.process import real_amp, run_python

from .options import known_level


# What follows the script is the script's, options of the same names included.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--opt-level",
    metavar="LEVEL",
    callback=known_level,
    help="In place of the script's own level.",
)
@click.option(
    "--rules",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A rules file, as amp-patch tune writes it, in place of the script's own rules.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--force", is_flag=True, help="Put amp_patch in the place of a real apex, too.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    opt_level: str | None,
    rules: str | None,
    is_module: bool,
    force: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run a script that imports apex, as `python SCRIPT ARGS` would, with apex in place.

    The processes that it starts find apex, too.
    """
    place = None if force else real_amp()
    if place is not None:
        click.echo(
            f"amp-patch: the script uses the apex.amp in {place}, which --opt-level and --rules do"
            " not reach; call amp-patch run --force to put amp_patch in its place.",
            err=True,
        )
    try:
        run_python([*(["-m"] if is_module else []), script, *args], opt_level, force, rules)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
