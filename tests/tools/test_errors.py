"""Bad arguments end a command with one line and exit code 2."""

from __future__ import annotations

import click
from click.testing import CliRunner

from amp_patch.tools.errors import BadArguments


@click.command()
def refuse() -> None:
    raise BadArguments("the folder must be writable; got x")


def test_the_line_says_what_was_wrong_and_the_exit_code_that_it_was_the_arguments() -> None:
    result = CliRunner().invoke(refuse)
    assert result.exit_code == 2
    assert result.stderr == "Error: the folder must be writable; got x\n"
    assert result.stdout == ""
