"""Runs scripts by ``amp-patch run``, and as it runs them in processes that are forked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import processes

import amp_patch.apex
from amp_patch.apex.process import environment_of_run

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "amp_patch", "run")
PACKAGES = Path(amp_patch.apex.__file__).parent / "packages"
#: The modules of apex by the files that there are, but for one that is a script.
SUPPLIED = sorted(
    str(path.relative_to(PACKAGES).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for path in PACKAGES.rglob("*.py")
    if path.parent != PACKAGES or path.stem in ("apex", "amp_C", "apex_C", "fused_adam_cuda")
    if path.stem != "multiproc"
)
#: torch's gloo aborts the exit of a process now and then, of scripts without amp_patch as well.
GLOO_ABORTS = "terminate called without an active exception"


def run(
    command: Sequence[object], cwd: Path | None = None, fork: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds this checkout; what it prints is in the result.

    Args:
        command: what to run.
        cwd: where.
        fork: True where it does not matter how the first Python starts: see `processes`.
        variables: of the environment, beside this process's own.
    """
    env = _environment(variables)
    if fork:
        return processes.run(command, cwd=cwd, env=env)
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env)


def run_pair(command: Sequence[object]) -> str:
    """Run a command as ranks 0 and 1, as ``torchrun`` does, and return what rank 0 prints."""
    envs = [_environment(variables) for variables in _of_two_ranks()]
    return _of_rank_0(processes.run_together([command] * 2, envs=envs, fork=False))


def run_forked(script: Path, arguments: Sequence[str], opt_level: str | None, ranks: int) -> str:
    """Return what ``amp-patch run --opt-level LEVEL SCRIPT ARGUMENTS`` prints, or its rank 0 of 2.

    The processes have the environment that ``amp-patch run`` gives, and are forks: see `processes`.
    """
    variables = _of_two_ranks() if ranks == 2 else [{}]
    envs = [environment_of_run(_environment(more), opt_level) for more in variables]
    command = [sys.executable, script, *arguments]
    return _of_rank_0(processes.run_together([command] * ranks, envs=envs))


def _of_two_ranks() -> list[dict[str, str]]:
    """Return the variables that ``torchrun`` sets for each of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


def _of_rank_0(done: Sequence[subprocess.CompletedProcess[str]]) -> str:
    for one in done:
        assert one.returncode == 0 or GLOO_ABORTS in one.stderr, one.stdout + one.stderr
    return done[0].stdout


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}
