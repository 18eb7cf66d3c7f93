"""What ``amp-patch run`` hands on to Python; what comes of it is in test_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from amp_patch.tools import command_line, run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Give what would have been started, and find no real apex."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(run, "run_python", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(run, "real_amp", lambda: None)
    return calls


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command_line.main, ["run", *arguments], prog_name="amp-patch")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.py"], (["train.py"], None, False, None, None)),
        (
            ["train.py", "--opt-level", "x"],
            (["train.py", "--opt-level", "x"], None, False, None, None),
        ),
        (["--opt-level", "O2", "train.py", "-m"], (["train.py", "-m"], "O2", False, None, None)),
        (
            ["-m", "package.train", "--help"],
            (["-m", "package.train", "--help"], None, False, None, None),
        ),
        (["--force", "--", "train.py", "--"], (["train.py", "--"], None, True, None, None)),
    ],
)
def test_options_before_the_script_are_ours_and_those_behind_it_are_its_own(
    started: list[tuple[Any, ...]], arguments: list[str], expected: tuple[Any, ...]
) -> None:
    assert called(*arguments).exit_code == 0
    assert started == [expected]


def test_a_rules_file_must_be_there(started: list[tuple[Any, ...]], tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    mended = {rules: ".", tmp_path: ".", "fast_norms": "; did you mean 'fast-norms'?"}
    for given, mend in mended.items():
        refused = called("--rules", str(given), "train.py")
        message = f"'--rules': '{given}' is neither a profile ('fast-norms') nor a file{mend}\n"
        assert (refused.exit_code, started) == (2, [])
        assert refused.stderr.endswith(message)
    rules.touch()
    assert called("--rules", str(rules), "train.py").exit_code == 0
    assert started == [(["train.py"], None, False, str(rules), None)]


def test_a_file_that_says_what_none_may_starts_nothing(
    started: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('profil = "fast-norms"\n')
    refused = called("--rules", str(rules), "train.py")
    assert (refused.exit_code, started) == (2, [])
    assert refused.stderr.endswith("did you mean 'profile'? Write profile in its place.\n")
    assert refused.stderr.count("\n") == 1


def test_rules_may_be_a_profile(started: list[tuple[Any, ...]]) -> None:
    assert called("--rules", "fast-norms", "train.py").exit_code == 0
    assert started == [(["train.py"], None, False, "fast-norms", None)]


@pytest.mark.parametrize("arguments", [[], ["--opt-level", "O9", "train.py"]])
def test_bad_arguments_start_nothing(started: list[tuple[Any, ...]], arguments: list[str]) -> None:
    assert called(*arguments).exit_code == 2
    assert started == []


@pytest.mark.parametrize("force", [False, True])
def test_a_real_apex_is_said_to_be_used_unless_amp_patch_takes_its_place(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setattr(run, "real_amp", lambda: "/site/apex")
    result = called(*["--force"] * force, "train.py")
    assert ("the script uses the apex.amp in /site/apex" in result.stderr) == (not force)
    assert started == [(["train.py"], None, force, None, None)]


def test_a_notebook_is_refused_with_what_makes_a_script_of_it(started) -> None:
    result = called("train.ipynb")
    assert (result.exit_code, started) == (2, [])
    assert "call jupyter nbconvert --to script train.ipynb" in result.stderr
    assert called("-m", "package.ipynb").exit_code == 0


def test_what_python_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("got a Python started with -S")

    monkeypatch.setattr(run, "run_python", refuse)
    result = called("train.py")
    assert (result.exit_code, result.stderr) == (1, "amp-patch: got a Python started with -S\n")
