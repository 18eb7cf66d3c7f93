"""A script that waits for a process of its own which was told to end is ended, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    monkeypatch.setattr(idle, "GRACE", 1.0)
    run = started(tmp_path, then)
    assert launch.run_to_end(run, timeout=100) is None
    assert run.code != 0  # it was ended


@pytest.mark.slow(instead="a script that takes its time at its end")
def test_a_script_that_goes_on_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "GRACE", 1.0)
    run = started(tmp_path, GOES_ON)
    assert launch.run_to_end(run, timeout=100) is None
    assert run.code == 0
    assert (tmp_path / "log.txt").read_text() == "its own end\n"


SLEEPS_BEHIND = """
    try:
        ScriptEnd()()  # in the script's own process, which ends in its own time
    finally:
        time.sleep(1.5)
        print("its own end", flush=True)
"""


def test_what_a_script_does_at_its_end_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "GRACE", 0.5)
    path = tmp_path / "train.py"
    text = "import time\nfrom amp_patch.tools.script_end import ScriptEnd\nif True:\n"
    path.write_text(text + SLEEPS_BEHIND)
    log, options = tmp_path / "log.txt", {"out": str(tmp_path)}
    run = launch.ScriptRun([sys.executable, str(path)], "json:loads", options, log)
    assert launch.run_to_end(run, timeout=100) is None
    assert log.read_text() == "its own end\n"


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that sleeps, as one of the script does that waits for its data."""
    inner = "import time; time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
    end = time.monotonic() + 30
    while len(list(descendants(process.pid))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    yield process
    launch._send(launch.signal.SIGKILL, process.pid)
    process.wait()


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def looks(watch: IdleWatch) -> list[bool]:
    found = []
    for _ in range(8):
        found.append(watch.is_idle())
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("grace", [0.1, 1000.0])
def test_beside_other_processes_a_script_gets_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: Any, grace: float
) -> None:
    monkeypatch.setattr(idle, "GRACE", 0.1)
    monkeypatch.setattr(idle, "GRACE_BESIDE_OTHERS", grace)
    watch = IdleWatch(sleeping.pid, tmp_path)
    assert not any(looks(watch))  # nobody was told
    (tmp_path / f"{idle.NAME}{ended_process()}").touch()
    first, *_, last = looks(watch)
    assert (first, last) == (False, grace < 1)


def test_a_script_is_not_idle_while_who_was_told_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: Any
) -> None:
    for name in ("GRACE", "GRACE_BESIDE_OTHERS"):
        monkeypatch.setattr(idle, name, 0.1)
    _, child = descendants(sleeping.pid)
    (tmp_path / f"{idle.NAME}{child.number}").touch()
    assert not any(looks(IdleWatch(sleeping.pid, tmp_path)))


def test_where_the_system_tells_of_no_process_none_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: Any
) -> None:
    monkeypatch.setattr(idle, "GRACE", 0.1)
    monkeypatch.setattr(idle, "descendants", lambda process: iter(()))
    (tmp_path / f"{idle.NAME}{ended_process()}").touch()
    assert not any(looks(IdleWatch(sleeping.pid, tmp_path)))


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize("has_tool", [False, True])
def test_a_process_that_a_script_waits_for_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_child: bool, has_tool: bool
) -> None:
    monkeypatch.setattr(
        idle.multiprocessing, "parent_process", lambda: object() if is_child else None
    )
    monkeypatch.delenv(OPTIONS, raising=False)
    if has_tool:
        monkeypatch.setenv(OPTIONS, json.dumps({"out": str(tmp_path)}))
    idle.note_end()
    noted = [f"{idle.NAME}{os.getpid()}"] if is_child and has_tool else []
    assert [path.name for path in tmp_path.iterdir()] == noted


def test_processes_of_processes_are_found(sleeping: Any) -> None:
    first, second = descendants(sleeping.pid)
    assert (first.number, first.group, second.group) == (sleeping.pid,) * 3
    launch._send(launch.signal.SIGKILL, sleeping.pid)
    time.sleep(0.5)
    assert list(descendants(sleeping.pid)) == []  # though nobody has asked how they ended
