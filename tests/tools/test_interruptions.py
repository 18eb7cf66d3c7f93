"""Signals end the commands that run a script: with the script, and with what was found by then."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support import nightly_but
from test_launch import has_ended

from amp_patch.tools import launch
from amp_patch.tools.command_line import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who is alive")

# Stands for a script with a tool of amp_patch in it. The signal goes to the command.
SCRIPT = """
    # a reader would find amp_patch here
    import json, os, sys, time
    number, found = int(sys.argv[1]), sys.argv[2]
    with open(os.path.join(json.loads(os.environ["AMP_PATCH_TOOL_OPTIONS"])["out"],
                           "found-rank0.jsonl"), "w") as file:
        file.write('{"an earlier": "line"}\\n' + found + '\\n{"an unfinished": ')
    with open("pid", "w") as file:
        print(os.getpid(), file=file)
    os.kill(os.getppid(), number)
    time.sleep(60)
"""
FOUND = {
    "diagnose": {"steps": 7, "overflowed_steps": 3, "overflows": 3, "causes": []}
    | {"near_limits": {}, "hidden": [], "was_ended": False, "infinite_state": {}}
    | {"flushed_at": None, "uncleared_steps": 0, "near_limits_of_loss": None, "buffers": []},
    "stats": {"calls": [{"phase": "step", "operator": "add", "dtype": "float32", "calls": 42}],
              "casts": [], "bulk_casts": 0, "casts_avoided": 0, "cache_hits": 0,
              "half_weights": 0, "buffers": []},
    "compare": {},
    "tune": {},
}  # fmt: skip
SHOWN = {
    "diagnose": "3 of 7 steps overflowed",
    "stats": "42",
    "compare": "O1 was not compared: interrupted",
    "tune": "before fp32 was measured",
}
OPTIONS = {"tune": ["--out", "rules.toml"]}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(launch, "GRACE", 2.0)
    # a shell starts background jobs so that they ignore SIGINT, and nohup SIGHUP
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hang_up)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signalled(command: str, number: int) -> Result:
    script = ["train.py", f"{number:d}", json.dumps(FOUND[command])]
    words = [*OPTIONS.get(command, []), "--", *script]
    return CliRunner().invoke(main, [command, *words], prog_name="amp-patch")


@pytest.mark.parametrize("command", FOUND)
@pytest.mark.parametrize(
    "number", nightly_but(SIGNALS[:2], SIGNALS), ids=lambda number: number.name
)
def test_a_signal_ends_the_script_and_what_was_found_is_shown(command: str, number: int) -> None:
    handler = signal.getsignal(number)
    result = signalled(command, number)
    assert result.exit_code == 128 + number, result.output
    assert has_ended(int(Path("pid").read_text()))
    assert list(Path("temporary").iterdir()) == []
    assert SHOWN[command] in result.output
    assert "Interrupted" in result.output
    assert signal.getsignal(number) is handler
    assert not Path("rules.toml").exists()


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch.signals_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_script_that_left_nothing_is_told_of() -> None:
    Path("train.py").write_text("# amp_patch\nimport os\nos.kill(os.getppid(), 15)\nwhile 1: 0")
    result = CliRunner().invoke(main, ["diagnose", "--", "train.py"])
    assert result.exit_code == 143
    assert "before the script made a step with amp" in result.output
