"""What tools share in the script's process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from amp_patch.tools import attach, child, early_notice
from amp_patch.tools.compare import recorder as compare
from amp_patch.tools.recorded import read_lines
from amp_patch.tools.sweep import recorder as sweep
from amp_patch.tools.tune import recorder as tune


def test_options_come_as_they_were_given(monkeypatch) -> None:
    monkeypatch.setenv("AMP_PATCH_TOOL_OPTIONS", '{"out": "x", "steps": 3}')
    assert child.options() == {"out": "x", "steps": 3}


def test_a_seed_is_set_before_amp_is_imported(monkeypatch) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setenv("AMP_PATCH_TOOL", "builtins:id")
    monkeypatch.setenv("AMP_PATCH_TOOL_OPTIONS", '{"out": "x", "seed": 3}')
    monkeypatch.setattr(early_notice, "watch", lambda options: None)
    monkeypatch.setattr(attach, "_given", {})
    drawn = []
    for _ in range(2):
        attach.attach()  # as Python does when it starts
        drawn.append((random.random(), torch.rand(()).item(), numpy.random.random()))
    assert drawn[0] == drawn[1]


def test_options_stay_where_a_script_clears_its_environment(monkeypatch) -> None:
    monkeypatch.setenv("AMP_PATCH_TOOL", "builtins:id")
    monkeypatch.setenv("AMP_PATCH_TOOL_OPTIONS", '{"out": "x"}')
    monkeypatch.setattr(early_notice, "watch", lambda options: None)
    monkeypatch.setattr(attach, "_given", {})
    attach.attach()
    monkeypatch.delenv("AMP_PATCH_TOOL_OPTIONS")
    assert child.options() == {"out": "x"}


@pytest.mark.parametrize("tool", [compare, sweep, tune])
def test_a_script_that_seeds_itself_before_it_imports_amp_wins(tool, monkeypatch) -> None:
    options = {"out": "x", "seed": 3, "steps": 1, "skipped": [], "timed": True}
    monkeypatch.setenv("AMP_PATCH_TOOL_OPTIONS", json.dumps(options))
    for name in ("at_end", "hear_sigint"):
        monkeypatch.setattr(child, name, MagicMock())
    if hasattr(tool, "at_end"):
        monkeypatch.setattr(tool, "at_end", MagicMock())
    for name in ("begin", "watch_clipping"):
        if hasattr(tool, "Recorder"):
            monkeypatch.setattr(tool.Recorder, name, MagicMock(), raising=False)
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    tool.start(MagicMock())
    assert torch.equal(torch.rand(()), expected)


def test_lines_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    lines = child.Lines(tmp_path, "steps")
    path = tmp_path / "steps-rank0.jsonl"
    assert read_lines(path) == []
    lines.write({"step": 1})
    with path.open("a") as file:
        file.write('{"step": ')  # another is on its way
    assert read_lines(path) == [{"step": 1}]
    lines.close()


def test_no_file_is_made_by_who_writes_nothing(tmp_path: Path) -> None:
    child.Lines(tmp_path, "steps")
    assert list(tmp_path.iterdir()) == []


def test_each_process_has_its_file(tmp_path: Path, monkeypatch) -> None:
    for rank in ("0", "0", "1"):
        monkeypatch.setenv("RANK", rank)
        lines = child.Lines(tmp_path, "steps")
        lines.write({})
        lines.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["steps-rank0-2.jsonl", "steps-rank0.jsonl", "steps-rank1.jsonl"]
