"""The command line as a whole: help, names of commands, exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_patch import __version__
from amp_patch.tools import command_line, options


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.py", "--epochs", "3"], "did you mean `amp-patch run train.py --epochs 3`?"),
        (["./sub/train.py"], "did you mean `amp-patch run ./sub/train.py`?"),
        (["--opt-level", "O2", "train.py"], "Did you mean `amp-patch run --opt-level ...`?"),
        (["-m", "train"], "Did you mean `amp-patch run -m ...`?"),
        (["swep"], "No such command 'swep'; did you mean 'sweep'?"),
        (["frobnicate"], f"the commands are {', '.join(command_line.COMMANDS)}"),
        (["stats", "-m", "train"], "Did you mean `amp-patch stats -- -m MODULE`?"),
        (["doctor", "--seconds", "nan"], "nan is not in the range"),
        (["doctor", "--seconds", "long"], "'long' is not a valid number."),
        (["stats", "--steps", "many", "--", "x.py"], "'many' is not a valid integer."),
        (
            ["stats", "--json", "a", __file__, "--epochs", "1", "--steps=3"],
            f"got --steps=3 after {__file__}, and no --; write amp-patch stats --steps=3 ... -- "
            f"{__file__}, or, where it is the script's own option, amp-patch stats -- {__file__} "
            "--epochs 1 --steps=3",
        ),
        (["run", "--opt-level", "01", "train.py"], "Did you mean O1, with the letter O?"),
        (["run", "--opt-level", "fast", "train.py"], "'fast' is not one of 'O0', 'O1'"),
    ],
)
def test_what_was_likely_meant_is_said(arguments: list[str], said: str) -> None:
    code, output = called(*arguments)
    assert code == 2
    assert said in output
    assert output.count("\n") == 1


def test_an_option_that_must_be_given_is_seen_after_a_script() -> None:
    code, output = called("tune", __file__, "--out", "rules.toml")
    assert (code, "got --out after" in output) == (2, True)


def test_after_two_dashes_every_option_is_the_scripts() -> None:
    code, output = called("stats", "--", "missing.py", "--steps", "3")
    assert (code, "got missing.py, which is no file" in output) == (2, True)


def test_short_options_are_those_of_other_programs() -> None:
    assert called("-h") == called("--help")
    assert called("run", "-h") == called("run", "--help")
    assert called("-V") == called("--version") == (0, f"amp-patch, version {__version__}\n")


def test_help_shows_how_it_is_called() -> None:
    assert "\n  amp-patch run train.py --epochs 10\n" in called("run", "--help")[1]
    assert "\n  amp-patch run train.py --epochs 10\n" in called("--help")[1]


def test_a_small_letter_o_will_do() -> None:
    assert options.known_levels(None, None, "o0, O2,o2") == ["O0", "O2"]  # type: ignore[arg-type]
    assert options.known_level(None, None, "o1") == "O1"  # type: ignore[arg-type]


def test_an_error_of_files_is_told_in_one_line(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "sweep.json")

    monkeypatch.setattr(command_line.Commands, "get_command", full)
    code, output = called("doctor")
    assert code == 1
    assert output == (
        "amp-patch: files must stay readable and writable while a command runs; got "
        f"[Errno {errno.ENOSPC}] No space left on device: 'sweep.json'\n"
    )


def test_what_the_terminal_cannot_show_does_not_end_a_command() -> None:
    code = (
        "from amp_patch.tools import command_line\n"
        "command_line.Commands.invoke = lambda *_: print('\\u2500 end')\n"
        "command_line.main(['doctor'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert result.stdout.split() == [b"?", b"end"], result.stderr


def test_a_rules_file_of_the_environment_is_found_from_wherever_a_script_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rules.toml", "fast-norms"):  # a profile's name wins over a file's
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "rules.toml")
    names = {"rules.toml": path, path: path, "fast-norms": "fast-norms", "missing": "missing"}
    for given, expected in names.items():
        monkeypatch.setenv("AMP_PATCH_RULES", given)
        called("--help")
        assert os.environ["AMP_PATCH_RULES"] == expected
