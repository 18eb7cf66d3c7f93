"""``amp-patch disable``: undoes ``amp-patch enable``."""

from __future__ import annotations

import click

from amp_patch.apex import environment

from .errors import BadArguments


@click.command()
def command() -> None:
    """Undo amp-patch enable: remove every file that it wrote into this environment."""
    folder = environment.packages_folder()
    try:
        removed = environment.disable(folder)
    except OSError as error:
        raise BadArguments(
            f"the files of {environment.NAME} must be removable; got {error.filename}: "
            f"{error.strerror}; call this as their owner"
        ) from error
    if removed:
        click.echo(f"Disabled: removed {environment.NAME} from {folder}.")
    else:
        click.echo(f"Nothing to undo: not enabled in {folder}.")
