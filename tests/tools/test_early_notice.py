"""A script that steps its optimizer and does not begin with amp is told of while it runs."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest
from forked_run import ForkedRun

from amp_patch.tools import launch
from amp_patch.tools.early_notice import NAME, STEPS
from amp_patch.tools.untrained import EARLY

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
    ("before", "enabled", "noted"),
    [(STEPS - 1, True, False), (STEPS, True, True), (0, False, True)],
)
def test_steps_without_amp_are_noted(
    tmp_path: Path, before: int, enabled: bool, noted: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(before=before, enabled=enabled)))
    options = {"out": str(tmp_path), "steps": 0}
    run = ForkedRun([sys.executable, str(script)], TOOL, options, tmp_path / "log.txt")
    assert run.code == 0, run.log.read_text()
    assert (tmp_path / NAME).exists() == noted


def test_it_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(launch, "PAUSE", 0.02)
    note = f"import time; open({os.fspath(tmp_path / NAME)!r}, 'w').close(); time.sleep(0.2)"
    launch.say.cache_clear()
    for _ in range(2):
        command = [sys.executable, "-S", "-c", note]
        run = launch.ScriptRun(command, "x:y", {"out": str(tmp_path)}, tmp_path / "log.txt")
        assert launch.run_to_end(run) is None
    assert capsys.readouterr().err == f"{EARLY}\n"
