"""What a tool has left to do is done in each process that has registered it, however it ends."""

from __future__ import annotations

import sys

import pytest
from processes import run

PROGRAM = """
import multiprocessing, os, sys
from amp_patch.tools.at_end import at_end

def last(text):
    at_end(lambda: print(text, flush=True))

last("file is closed")
last("written")
process = multiprocessing.get_context("fork").Process(target=last, args=["written by the fork"])
process.start()
process.join()
{}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)"])
def test_a_process_that_ends_does_what_it_has_registered_once(end: str) -> None:
    done = run([sys.executable, "-c", PROGRAM.format(end)])
    expected = ["written by the fork", "written", "file is closed"]
    assert (done.returncode, done.stdout.splitlines()) == (3, expected), done.stderr
