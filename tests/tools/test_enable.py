"""What ``amp-patch enable`` and ``disable`` say; what they write is in drop_in/test_environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_patch import __version__
from amp_patch.apex import environment
from amp_patch.tools import command_line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment's packages."""
    monkeypatch.setattr(environment, "packages_folder", lambda: tmp_path)
    monkeypatch.setattr(environment, "_is_own", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def called(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, arguments, prog_name="amp-patch")
    return result.exit_code, " ".join(result.output.split())


def test_each_call_says_what_it_did_and_may_be_repeated(folder: Path) -> None:
    enabled = f"Enabled in {folder} by amp_patch {__version__}. Undo: amp-patch disable"
    off = f"Not enabled in {folder}: apex can be imported under `amp-patch run` only."
    assert called("enable", "--status") == (0, off)
    code, said = called("enable")
    assert (code, "Undo: amp-patch disable" in said) == (0, True)
    assert called("enable") == called("enable", "--status") == (0, enabled)
    assert called("disable") == (0, f"Disabled: removed amp-patch-apex from {folder}.")
    assert called("disable") == (0, f"Nothing to undo: not enabled in {folder}.")


def test_an_environment_that_sees_the_systems_packages_says_whose_it_is(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path_factory.mktemp("system")
    environment.enable(system)
    monkeypatch.syspath_prepend(str(system))
    said = f"Enabled by another environment's packages, in {system}; not in {folder}."
    assert called("enable", "--status") == (0, said)


def test_what_is_spoilt_is_told(folder: Path) -> None:
    called("enable")
    (folder / "amp_patch_apex.py").write_text("")
    assert "amp-patch enable renews it" in called("enable", "--status")[1]


def test_a_refusal_is_one_line_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_is_own", lambda: False)
    code, said = called("enable")
    assert code == 2
    assert said.startswith("amp-patch: only a virtual environment is enabled unasked; got")
    assert list(folder.iterdir()) == []
    assert called("enable", "--force")[0] == 0
