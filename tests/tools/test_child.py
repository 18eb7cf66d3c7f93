"""What tools share in the script's process."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from amp_patch.tools import child
from amp_patch.tools.recorded import read_lines


def test_options_come_as_they_were_given(monkeypatch) -> None:
    monkeypatch.setenv("AMP_PATCH_TOOL_OPTIONS", '{"out": "x", "steps": 3}')
    assert child.options() == {"out": "x", "steps": 3}


def test_a_seed_sets_all_random_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        child.seed_everything(3)
        drawn.append((random.random(), torch.rand(()).item(), numpy.random.random()))
    assert drawn[0] == drawn[1]


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
