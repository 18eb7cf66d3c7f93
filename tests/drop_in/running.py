"""Runs scripts by ``amp-patch run`` in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "amp_patch", "run")
#: torch's gloo aborts the exit of a process now and then, of scripts without amp_patch as well.
GLOO_ABORTS = "terminate called without an active exception"


def run(
    command: Sequence[object], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds this checkout; what it prints is in the result.

    Args:
        command: what to run.
        cwd: where.
        variables: of the environment, beside this process's own.
    """
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environment(variables),
    )


def run_pair(command: Sequence[object]) -> str:
    """Run a command as ranks 0 and 1, as ``torchrun`` does, and return what rank 0 prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank in (0, 1)
    ]
    printed = [process.communicate() for process in processes]
    for process, (out, err) in zip(processes, printed, strict=True):
        assert process.returncode == 0 or GLOO_ABORTS in err, out + err
    return printed[0][0]


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}
