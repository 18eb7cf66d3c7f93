"""A Python that has imported torch, and becomes the script of a job in each of its forks.

Started by `warm`, by its path. A line of JSON on the standard input is a job: "command" (what
stands behind ``python``), "environment", "log" (a file) and "folder". Of each it prints the id of
the fork, and its exit code when it has ended. To import torch with what its optimizers need takes
seconds, which is more than many a script that is run dozens of times.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

IMPORTED = ("torch", "torch._dynamo")


def next_script() -> dict[str, Any] | None:
    """Serve jobs until there are no more; return the job in its fork, None in the server."""
    server = str(os.getpid())
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            os.setsid()  # before anybody knows of it, who may want to end it
            print(os.getpid(), flush=True)
            job: dict[str, Any] = json.loads(line)
            return {**job, "server": server}
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """Make this process what the job's command would be, but for its modules."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, opened in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(opened, stream)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # which has read the environment before
        is_off = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        importlib.import_module("amp_patch.patching").put(dynamo.config, "disable", is_off)
    attach = importlib.import_module("amp_patch.tools.attach")
    if attach.PARENT in os.environ:  # the command that is killed takes the server along, and it us
        os.environ[attach.PARENT] = job["server"]
    attach.attach()


def run(command: list[str]) -> None:
    """Run ``script.py ARGS`` or ``-m module ARGS`` as Python would."""
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    importlib.import_module("amp_patch.tools.attach").end_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    job = next_script()
    if job is not None:  # at the top, so that the script ends as scripts do
        become(job)
        run(job["command"])
