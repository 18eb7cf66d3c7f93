"""What several commands ask of the same options: levels, a folder to write to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from .errors import BadArguments


def known_level(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the name of a level."""
    return None if value is None else known_levels(context, param, value)[0]


def known_levels(context: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Check names of levels with commas between them; each once, in the order given.

    A small letter o will do.
    """
    # Imported late, for that takes torch, which a command without levels need not wait for.
    from amp_patch.levels import OPT_LEVELS

    given = [name.strip() for name in value.split(",")]
    for name in given:
        if name.upper() not in OPT_LEVELS:
            meant = f"O{name[-1:]}"
            mend = f" Did you mean {meant}, with the letter O?" if meant in OPT_LEVELS else ""
            levels = ", ".join(map(repr, OPT_LEVELS))
            raise click.BadParameter(f"{name!r} is not one of {levels}.{mend}")
    return list(dict.fromkeys(name.upper() for name in given))


def writable_folder(path: Path) -> Path:
    """Return a folder, made where there is none.

    Raises:
        BadArguments: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArguments(
            f"the folder to write to must be one that can be made; got {path}: {error.strerror}"
        ) from error
    try:
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise BadArguments(
            f"the folder to write to must be writable; got {path}: {error.strerror}"
        ) from error
