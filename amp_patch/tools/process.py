"""How the process of a script is started: a command, an environment, a file for what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Process(Protocol):
    """A process that leads a session of its own; see `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """Its id."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; raise `subprocess.TimeoutExpired` where it runs longer."""


#: Starts a process, from its command, its environment, and the file for what it prints.
Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a process of its own session, which reads nothing."""
    with log.open("wb") as output:
        return subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches this process only, which ends the script in its own time.
            start_new_session=True,
        )
