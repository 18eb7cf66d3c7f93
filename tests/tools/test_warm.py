"""A script in a fork of a warm Python does what it does in a Python of its own.

The server is the real one, but for torch, which it does not import here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch import has_ended, wait_for

from amp_patch.tools import launch, warm
from amp_patch.tools.crash import crash_reason
from amp_patch.tools.process import start_process
from amp_patch.tools.warm import WarmPython

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks only there")

SCRIPT = """
import atexit, multiprocessing, os, sys
from pathlib import Path
atexit.register(print, "at exit", flush=True)
print(sys.argv, __name__, os.getcwd(), sys.path[0], os.environ["VALUE"], sys.stdin.read())
sys.stdout.flush()
print(multiprocessing.parent_process(), Path(__file__).name, os.getsid(0) == os.getpid())
class Own: pass
import pickle; print(type(pickle.loads(pickle.dumps(Own()))), flush=True)
print(sorted(set(os.environ) - {{"LC_CTYPE"}}), flush=True)  # which Python sets itself
{ending}
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmPython]:
    text = Path(warm._SERVER).read_text()
    light = tmp_path / "server.py"
    light.write_text(re.sub(r"(?m)^IMPORTED = .*$", "IMPORTED = ()", text))
    assert light.read_text() != text
    monkeypatch.setattr(warm, "_SERVER", light)
    monkeypatch.setattr(warm, "_DRIVER", tmp_path / "no driver")
    monkeypatch.chdir(tmp_path)
    with WarmPython({"PYTHONHASHSEED": "0"}) as python:
        yield python


@pytest.mark.parametrize(
    ("ending", "code", "is_module"),
    [
        ("sys.exit(3)", 3, False),
        ("1 / 0", 1, False),
        ("os.kill(os.getpid(), 9)", -9, False),
        ("", 0, True),
    ],
)
def test_a_script_does_the_same(
    server: WarmPython, tmp_path: Path, ending: str, code: int, is_module: bool, monkeypatch
) -> None:
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "first.py").touch()
    monkeypatch.chdir(elsewhere)  # where the server begins
    assert server.start([sys.executable, "first.py"], {}, tmp_path / "log.txt").wait(60) == 0
    monkeypatch.chdir(tmp_path)
    (folder / "train.py").write_text(SCRIPT.format(ending=ending))
    words = ["-m", "project.train"] if is_module else ["project/train.py"]
    environment = {"VALUE": "x", "PATH": ""}
    seen = []
    for start in (start_process, server.start, server.start):
        log = tmp_path / f"{len(seen)}.txt"
        process = start([sys.executable, *words, "a", "--b=1"], environment, log)
        assert process.wait(60) == process.poll() == code
        lines = log.read_text().splitlines()
        printed = [line for line in lines if not line.startswith((" ", "Traceback"))]
        seen.append((printed, crash_reason(code, log)))
    assert "'a', '--b=1'] __main__" in seen[0][0][0]
    assert seen[1] == seen[2] == seen[0]
    assert not server.is_off


def test_a_script_that_hangs_is_ended(server: WarmPython, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    (tmp_path / "hangs.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")
    log, options = tmp_path / "log.txt", {"out": str(tmp_path)}
    command = [sys.executable, "hangs.py"]
    with launch.ScriptRun(command, "", options, log, start=server.start) as run:
        with pytest.raises(subprocess.TimeoutExpired):
            run._process.wait(0.01)
        while "here" not in log.read_text():
            time.sleep(0.01)
        assert run.code is None
        run.stop()
    assert run.code
    assert run.wait(0) == run.code


COMMAND = """
import os, sys, time
from pathlib import Path
from amp_patch.tools import launch, warm

warm._SERVER, warm._DRIVER = Path("server.py"), Path("no driver")
options = {"out": ".", "level": "any"}
command = [sys.executable, "hangs.py"]
with warm.WarmPython({}) as python:
    run = launch.ScriptRun(command, "my_tool:start", options, Path("log.txt"), start=python.start)
    time.sleep(600)
"""


def test_a_script_does_not_outlive_a_command_that_is_killed(server, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)"
    )
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", COMMAND]) as command:
        wait_for(log)
        command.kill()
    assert all(has_ended(int(one)) for one in log.read_text().split())


def test_other_commands_and_dead_servers_get_processes_of_their_own(
    server: WarmPython, tmp_path: Path, monkeypatch
) -> None:
    log = tmp_path / "log.txt"
    assert server.start(["true"], {"PATH": "/bin:/usr/bin"}, log).wait(60) == 0
    assert server._server is None
    monkeypatch.setattr(warm, "_SERVER", tmp_path / "is not there")
    command = [sys.executable, "-S", "-c", "print('ran')"]
    assert server.start(command, {}, log).wait(60) == 0
    assert log.read_text() == "ran\n"
    assert server.is_off
