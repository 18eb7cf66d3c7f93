"""What the command line says of arguments that it cannot work with."""

from __future__ import annotations

import click


class BadArguments(click.ClickException):
    """One clear line, and exit code 2; nothing was started or written."""

    exit_code = 2
