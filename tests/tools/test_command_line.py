"""The command line as a whole: help, names of commands, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

from amp_patch.tools import command_line


def called(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, arguments, prog_name="amp-patch")
    return result.exit_code, result.output


def test_help_names_every_command() -> None:
    code, output = called("--help")
    assert code == 0
    assert all(f"\n  {name} " in output for name in command_line.COMMANDS)
    assert called() == (0, output)


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    code, output = called(name, "--help")
    assert code == 0
    assert output.startswith(f"Usage: amp-patch {name}")


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    module, line = command_line.COMMANDS[name]
    command = importlib.import_module(f"amp_patch.tools.{module}").command
    assert command.help.split("\n")[0].startswith(line.rstrip(".").split(",")[0])


@pytest.mark.parametrize(
    "arguments",
    [["runn"], ["run"], ["run", "--opt-level", "O7", "x.py"], ["--opt-level"], ["run", "--no"]],
)
def test_bad_arguments_are_told_in_one_line(arguments: list[str]) -> None:
    code, output = called(*arguments)
    assert code == 2
    assert output.startswith("amp-patch")
    assert output.count("\n") == 1


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from amp_patch.tools.command_line import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
