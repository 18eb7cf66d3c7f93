"""A script that was told to end does, whatever it catches or waits for."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from amp_patch.tools import script_end
from amp_patch.tools.script_end import ScriptEnd

#: Started by a Python of its own, for that waits for threads at its end.
PROGRAM = """
import queue, threading
from amp_patch.tools import script_end

script_end.GRACE = 0.0
print("trains")
{}
"""
WAITING = {
    "main": "threading.Thread(target=script_end.ScriptEnd()).start(); queue.Queue().get()",
    "another": "threading.Thread(target=queue.Queue().get).start(); script_end.ScriptEnd()()",
}


@pytest.mark.parametrize("waiting", WAITING)
def test_a_script_that_waits_for_its_own_threads_is_ended(waiting: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(WAITING[waiting])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trains\n", "")


TRAINS_ON = """
import atexit
from amp_patch.tools.at_end import at_end

def kept(depth=100):
    return kept(depth - 1) if depth else "kept"

script_end.GRACE = 60.0
end = script_end.ScriptEnd()
at_end(lambda: print(kept()))
atexit.register(end)
end()
"""


def test_a_script_that_trains_on_when_python_ends_is_ended() -> None:
    command = [sys.executable, "-c", PROGRAM.format(TRAINS_ON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trains\nkept\n", "")


def test_a_script_that_catches_its_end_is_ended_by_the_next_step(monkeypatch) -> None:
    called = []
    monkeypatch.setattr(script_end, "_end_later", lambda is_main: None)
    monkeypatch.setattr(script_end.atexit, "_run_exitfuncs", lambda: called.append("saved"))
    monkeypatch.setattr(script_end.os, "_exit", called.append)
    end = ScriptEnd()
    for _ in range(2):
        with contextlib.suppress(SystemExit):  # as `except:` around a step does
            end()
    assert called == ["saved", 0]
