"""What the command line says of arguments that it cannot work with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


class BadArguments(click.ClickException):
    """One clear line, and exit code 2; nothing was started or written."""

    exit_code = 2


def refuse_notebook(path: str | Path) -> None:
    """Refuse a notebook in the place of a script: JSON reads like Python, and says nothing.

    Raises:
        BadArguments: it is one.
    """
    if Path(path).suffix == ".ipynb":
        raise BadArguments(
            f"a script must be Python; got the notebook {path}; call jupyter nbconvert --to script "
            f"{shlex.quote(str(path))}, and give what it writes"
        )
