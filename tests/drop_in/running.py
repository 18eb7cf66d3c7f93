"""Runs scripts by ``amp-patch run`` in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "amp_patch", "run")


def run(
    command: Sequence[object], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds this checkout; what it prints is in the result.

    Args:
        command: what to run.
        cwd: where.
        variables: of the environment, beside this process's own.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=environment
    )
