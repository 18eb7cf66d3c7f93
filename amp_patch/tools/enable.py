"""``amp-patch enable``: every process of this environment can import apex."""

from __future__ import annotations

from pathlib import Path

import click

from amp_patch import __version__
from amp_patch.apex import environment

from .errors import BadArguments


@click.command()
@click.option("--status", is_flag=True, help="Say whether it is enabled, and change nothing.")
@click.option(
    "--force", is_flag=True, help="Also where this Python is no virtual environment of its own."
)
def command(status: bool, force: bool) -> None:
    """Let every process of this environment import apex.

    For launchers, clusters and notebooks, whose processes `amp-patch run` cannot start. It writes
    a small package, amp-patch-apex, into the environment that this command belongs to. Undo it by
    `amp-patch disable` or `pip uninstall amp-patch-apex`.

    \b
    amp-patch enable
    python -c "from apex import amp"
    amp-patch enable --status
    """
    folder = environment.packages_folder()
    if status:
        click.echo(told(folder))
        return
    try:
        environment.refuse(folder, force)
        is_new = environment.enable(folder)
    except environment.NotPossible as error:
        raise BadArguments(str(error)) from error
    if is_new:
        click.echo(
            f"Enabled: every process of this environment imports apex from amp_patch, by "
            f"{environment.NAME} in {folder}. Undo: amp-patch disable"
        )
    else:
        click.echo(told(folder))


def told(folder: Path) -> str:
    """Return whether an environment is enabled, in one line.

    Args:
        folder: of its packages.
    """
    standing = environment.look(folder)
    other = environment.enabled_folder()
    if standing.version is None:
        if other is not None:
            return f"Enabled by another environment's packages, in {other}; not in {folder}."
        return f"Not enabled in {folder}: apex can be imported under `amp-patch run` only."
    if not standing.is_whole:
        return (
            f"Enabled in {folder} by amp_patch {standing.version}, and not as amp_patch "
            f"{__version__} does it; amp-patch enable renews it."
        )
    return f"Enabled in {folder} by amp_patch {standing.version}. Undo: amp-patch disable"
