"""A script that steps its optimizer and does not begin with amp is told of, and then ended."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
from forked_run import ForkedRun

from amp_patch.tools import launch, untrained
from amp_patch.tools.early_notice import MOST_STEPS, NAME, STEPS, VARIABLE, most_steps
from amp_patch.tools.errors import BadArguments

SCRIPT = """
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range({before}):
        optimizer.step()
    from amp_patch import amp
    model, optimizer = amp.initialize(model, optimizer, enabled={enabled}, verbosity=0)
    for step in range(30):
        optimizer.step()
"""
TOOL = "amp_patch.tools.stats_child:start"


@pytest.mark.parametrize(
    ("before", "most", "enabled", "noted"),
    [
        (STEPS - 1, None, True, None),
        (STEPS, None, True, STEPS),
        (0, None, False, STEPS),
        (MOST_STEPS, None, True, MOST_STEPS),
        (MOST_STEPS - 1, None, True, STEPS),
        (MOST_STEPS, 0, True, STEPS),
        (9, 8, True, 8),
    ],
)
def test_steps_without_amp_are_noted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    most: int | None,
    enabled: bool,
    noted: int | None,
) -> None:
    if most is not None:
        monkeypatch.setenv(VARIABLE, str(most))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(before=before, enabled=enabled)))
    options = {"out": str(tmp_path), "steps": 0}
    run = ForkedRun([sys.executable, str(script)], TOOL, options, tmp_path / "log.txt")
    assert run.code == 0, run.log.read_text()
    note = tmp_path / NAME
    assert (int(note.read_text()) if note.exists() else None) == noted


def noting(folder: Path, steps: int, seconds: float) -> launch.ScriptRun:
    """Start what notes steps as a script would, and lives so long after that."""
    path = os.fspath(folder / NAME)
    note = f"""
        import os, time
        open({path + ".whole"!r}, "w").write("{steps}")
        os.replace({path + ".whole"!r}, {path!r})
        time.sleep({seconds})
    """
    command = [sys.executable, "-S", "-c", textwrap.dedent(note)]
    return launch.ScriptRun(command, "x:y", {"out": str(folder)}, folder / "log.txt")


def test_it_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(launch, "PAUSE", 0.02)
    launch.say.cache_clear()
    for _ in range(2):
        assert launch.run_to_end(noting(tmp_path, STEPS, 0.2)) is None
    assert capsys.readouterr().err == f"{untrained.notice(STEPS)}\n"


def test_a_script_that_goes_on_without_amp_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    run = noting(tmp_path, MOST_STEPS, 60)
    with pytest.raises(
        BadArguments, match=rf"200 optimizer steps.* set {VARIABLE}.*; else call model"
    ):
        launch.run_to_end(run)
    assert run.code is not None


@pytest.mark.parametrize(
    ("given", "expected"), [(None, MOST_STEPS), ("", MOST_STEPS), ("0", 0), ("5000", 5000)]
)
def test_the_environment_says_how_long_to_wait(monkeypatch, given, expected: int) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    assert most_steps() == expected
    assert untrained.is_to_end(expected - 1) is False
    assert untrained.is_to_end(max(1, expected)) is (expected > 0)


@pytest.mark.parametrize("given", ["-1", "many", "1.5"])
def test_what_is_no_number_of_steps_is_refused_before_anything_runs(monkeypatch, given) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(BadArguments, match=rf"got '{given}'"):
        untrained.refuse_without_amp([__file__])
