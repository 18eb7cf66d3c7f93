"""Starts scripts in forks of a Python that has imported torch, which takes a tenth of the time.

Knows the server, and when it can be used; what a script is run for is the tools' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from amp_patch.apex.process import environment_of_run

from .attach import PARENT
from .process import Process, start_process

_SERVER = Path(__file__).with_name("warm_server.py")
#: A driver of NVIDIA's: CUDA does not bear a fork of a process that has begun to use it.
_DRIVER = Path("/dev/nvidiactl")


class WarmPython:
    """A server that is started by the first script, and ended at the end of a ``with`` block.

    Args:
        environment: variables that Python reads when it starts, such as PYTHONHASHSEED.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._server: subprocess.Popen[bytes] | None = None
        self.is_off = sys.platform != "linux" or _DRIVER.exists()

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start a script in a fork; see `process.start_process`, which serves other commands."""
        if self.is_off or command[0] != sys.executable:
            return start_process(command, environment, log)
        job = {"command": list(command[1:]), "environment": dict(environment)}
        job |= {"log": str(log.absolute()), "folder": str(Path.cwd())}
        server = self._server = self._server or self._started()
        requests, answers = server.stdin, server.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps(job).encode() + b"\n")
            requests.flush()
            return _Fork(int(answers.readline()), answers)
        except (OSError, ValueError):  # the server could not begin, or has ended
            self.is_off = True
            return start_process(command, environment, log)

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {PARENT: str(os.getpid()), **self._environment}
        return subprocess.Popen(
            [sys.executable, str(_SERVER)],
            env={**environment_of_run(os.environ, None, force=True), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # what `select` does not see must not wait in a buffer
            start_new_session=True,
        )


class _Fork:
    """A process of the server's, as `process.Process`.

    Args:
        pid: its id.
        answers: of the server, of which the next is the exit code.
    """

    def __init__(self, pid: int, answers: IO[bytes]) -> None:
        self.pid, self._answers = pid, answers
        self._code: int | None = None

    def poll(self) -> int | None:
        """See `process.Process`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """See `process.Process`."""
        if self._code is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._code = int(self._answers.readline() or b"-9")
        return self._code
