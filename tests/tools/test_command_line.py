"""The command line as a whole: help, names of commands, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_patch.tools import command_line, options
from amp_patch.tools.errors import BadArguments


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


def test_levels_are_named_with_commas() -> None:
    assert options.known_levels(None, None, "O0, O2,O0") == ["O0", "O2"]  # type: ignore[arg-type]


def test_a_folder_is_made_where_there_is_none(tmp_path: Path) -> None:
    assert options.writable_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(BadArguments, match="got .*file"):
        options.writable_folder(tmp_path / "file")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks for a folder that refuses root")
def test_a_folder_that_refuses_files_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BadArguments, match="must be writable; got /proc"):
        options.writable_folder(Path("/proc"))
    assert options.writable_folder(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []
