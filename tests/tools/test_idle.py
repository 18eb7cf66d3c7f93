"""A script that waits for a process of its own which was told to end is ended, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from amp_patch.tools import idle, launch
from amp_patch.tools.attach import OPTIONS
from amp_patch.tools.idle import IdleWatch, descendants

#: A script whose worker is told to end and hands over nothing; then the script itself.
SCRIPT = """
import multiprocessing, queue, time
from amp_patch.tools.script_end import ScriptEnd

def work(results):
    ScriptEnd()()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=work, args=(results,))
    worker.start()
{}
"""
WAITS = """
    print("waits", flush=True)
    results.get()
"""
LOOKS_NOW_AND_THEN = """
    while True:
        try:
            results.get(timeout=0.1)
        except queue.Empty:
            pass
"""
GOES_ON = """
    worker.join()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    print("its own end", flush=True)
"""


def started(folder: Path, then: str) -> launch.ScriptRun:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(then))
    options = {"out": str(folder)}
    return launch.ScriptRun([sys.executable, str(path)], "json:loads", options, folder / "log.txt")


@pytest.mark.parametrize("then", [WAITS, LOOKS_NOW_AND_THEN], ids=["waits", "looks"])
def test_a_script_that_waits_for_a_process_that_was_ended_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(idle, "GRACE", 2.0)
    run = started(tmp_path, then)
    assert launch.run_to_end(run, timeout=100) is None
    assert run.code != 0  # it was ended


def test_a_script_that_goes_on_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "GRACE", 1.0)
    run = started(tmp_path, GOES_ON)
    assert launch.run_to_end(run, timeout=100) is None
    assert run.code == 0
    assert (tmp_path / "log.txt").read_text() == "its own end\n"


def test_only_who_was_told_to_end_can_be_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "GRACE", 0.1)
    sleeps = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch = IdleWatch(sleeps.pid, tmp_path)

        def looks() -> list[bool]:
            found = []
            for _ in range(10):
                found.append(watch.is_idle())
                time.sleep(0.1)
            return found

        assert not any(looks())
        monkeypatch.setenv(OPTIONS, json.dumps({"out": str(tmp_path)}))
        idle.note_end()
        first, *_, last = looks()
        assert (first, last) == (False, True)
    finally:
        sleeps.kill()
        sleeps.wait()


def test_a_note_of_a_process_without_a_tool_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTIONS, raising=False)
    idle.note_end()


def test_processes_of_processes_are_found() -> None:
    inner = "import time; time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
    try:
        end = time.monotonic() + 30
        while len(found := list(descendants(process.pid))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        first, second = found
        assert (first.number, first.group, second.group) == (process.pid,) * 3
    finally:
        launch._send(launch.signal.SIGKILL, process.pid)
        process.wait()
    assert list(descendants(process.pid)) == []
