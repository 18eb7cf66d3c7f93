"""A script runs in its own process with a tool in it, and is ended with all that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support import nightly_but

from amp_patch.tools import launch
from amp_patch.tools.crash import crash_reason
from amp_patch.tools.errors import BadArguments

TOOL = """
    import atexit, json
    from amp_patch.tools import child
    def start(module):
        lines = child.Lines(child.options()["out"], "events")
        lines.write({"module": module.__name__, "level": child.options()["level"]})
        atexit.register(lines.write, {"end": True})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "my_tool.py").write_text(textwrap.dedent(TOOL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def started(folder: Path, script: str, *arguments: str) -> launch.ScriptRun:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    options = {"out": str(folder), "level": "any"}
    command = launch.python_command([str(path), *arguments])
    return launch.ScriptRun(command, "my_tool:start", options, folder / "log.txt", "O2")


@pytest.mark.parametrize(
    "imported",
    nightly_but(["from apex import amp"], ["from apex import amp", "from amp_patch import amp"]),
)
def test_the_tool_starts_when_the_script_imports_amp(folder: Path, imported: str) -> None:
    script = f"import sys\n{imported}\nprint(amp.__name__, sys.argv[1:])"
    with started(folder, script, "a", "--b") as run:
        assert run.wait(120) == 0, (folder / "log.txt").read_text()
    assert "['a', '--b']" in (folder / "log.txt").read_text()
    lines = (folder / "events-rank0.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert written == [{"module": "amp_patch.session", "level": "any"}, {"end": True}]


def test_the_level_of_the_script_is_overridden(folder: Path) -> None:
    script = "import os; print(os.environ['AMP_PATCH_OPT_LEVEL']); 1 / 0"
    with started(folder, script) as run:
        assert run.wait(60) == 1
    assert (folder / "log.txt").read_text().startswith("O2\n")
    reason = "ZeroDivisionError: division by zero (train.py, line 1)"  # as it is from this folder
    assert crash_reason(1, folder / "log.txt") == reason


HANGS = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # in a process group of its own, as torchrun starts its workers
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc who is alive")
def test_a_script_that_refuses_to_end_is_killed_with_its_children(
    folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    run = started(folder, HANGS)
    log = folder / "log.txt"
    wait_for(log)
    assert run.wait(0.1) is None
    run.stop()
    assert run.code == -signal.SIGKILL
    assert has_ended(int(log.read_text()))


COMMAND = """
import time
from pathlib import Path
from amp_patch.tools import launch

options = {"out": ".", "level": "any"}
command = launch.python_command(["train.py"])
run = launch.ScriptRun(command, "my_tool:start", options, Path("log.txt"))
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends the script")
def test_a_script_does_not_outlive_a_command_that_is_killed(folder: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    (folder / "train.py").write_text(script)
    log = folder / "log.txt"
    with subprocess.Popen([sys.executable, "-c", COMMAND]) as command:
        wait_for(log)
        command.kill()
    assert has_ended(int(log.read_text()))


def wait_for(log: Path) -> None:
    """Wait until a script has printed; it starts anew, and imports torch from a cold disk."""
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(process: int) -> bool:
    """Return whether a process is gone within seconds, or waits for who adopted it."""
    status = Path(f"/proc/{process}/status")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_an_interruption_while_a_script_is_ended_kills_it(folder: Path, monkeypatch) -> None:
    script = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True)"
    run = started(folder, f"{script}; time.sleep(60)")
    wait_for(folder / "log.txt")
    monkeypatch.setattr(run, "wait", interrupted)
    with pytest.raises(launch.Interrupted) as raised, run:
        raise launch.Interrupted(signal.SIGINT)
    assert raised.value.number == signal.SIGINT
    assert run.code == -signal.SIGKILL


def interrupted(seconds: float) -> None:
    raise launch.Interrupted(signal.SIGTERM)


def test_a_program_beside_python_is_found() -> None:
    assert launch.python_command(["torchrun", "train.py"])[1:] == ["train.py"]
    assert os.access(launch.python_command(["torchrun"])[0], os.X_OK)


def test_a_file_that_the_system_starts_is_not_given_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text('#!/bin/sh\npython train.py "$@"\n')
    Path("app").mkdir()
    Path("app/__main__.py").touch()
    assert launch.python_command(["./train.sh", "x"]) == [sys.executable, "./train.sh", "x"]
    Path("train.sh").chmod(0o755)
    assert launch.python_command(["./train.sh", "x"]) == [str(tmp_path / "train.sh"), "x"]
    assert launch.python_command([sys.executable, "-u", "t.py"]) == [sys.executable, "-u", "t.py"]
    assert launch.python_command(["app", "x"]) == [sys.executable, "app", "x"]


def test_a_module_is_run_by_python() -> None:
    assert launch.python_command(["-m", "train", "x"]) == [sys.executable, "-m", "train", "x"]


@pytest.mark.parametrize("words", [[], ["-m"], ["missing.py"], ["no/such/program"], ["a.ipynb"]])
def test_what_is_no_script_is_refused(words: list[str]) -> None:
    with pytest.raises(BadArguments, match="script"):
        launch.python_command(words)


def test_a_module_that_is_given_as_a_script_is_told_of_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package/train.py").touch()
    with pytest.raises(BadArguments, match=r"which is no file; did you mean -m package\.train\?$"):
        launch.python_command(["package.train"])


@pytest.mark.parametrize("word", ["data", "package", "package/train", "package.train.", "."])
def test_what_m_does_not_run_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data", "package"):
        Path(name).mkdir()
    for name in ("__init__.py", "train.py"):
        Path("package", name).touch()
    with pytest.raises(BadArguments, match=r"which is no file$"):
        launch.python_command([word])
