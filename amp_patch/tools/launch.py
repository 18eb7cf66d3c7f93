"""Runs a user's script in a process of its own, with one of the tools attached to its training.

Knows processes and environments; what is observed in the script, and what is made of it, is the
tools' own. Imports no torch: the script's process does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from amp_patch.apex.process import environment_of_run

from .errors import BadArguments

#: Seconds that a script gets to end by itself after each of the signals that ask it to.
GRACE = 5.0
#: Names what is called in the script's process, as "module:function", when it imports amp_patch.
TOOL = "AMP_PATCH_TOOL"
#: JSON that this function finds there.
OPTIONS = "AMP_PATCH_TOOL_OPTIONS"


def python_command(words: Sequence[str]) -> list[str]:
    """Return the command that runs what stands after ``--``.

    Args:
        words: ``script.py ARGS``, ``-m module ARGS``, or a program on the path that starts Python
            processes of this environment (``torchrun --nproc_per_node 2 script.py``).

    Raises:
        BadArguments: there is no such script or program.
    """
    if not words or words == ["-m"]:
        raise BadArguments("a script must stand after --; got none; write -- train.py ARGS")
    first = words[0]
    if first == "-m" or Path(first).is_file():
        return [sys.executable, *words]
    beside = Path(sys.executable).parent / first
    program = str(beside) if beside.is_file() else shutil.which(first)
    if program is None:
        raise BadArguments(f"what stands after -- must be a script; got {first}, which is no file")
    return [program, *words[1:]]


class ScriptRun:
    """One run of a script, in a process group of its own.

    Args:
        command: of `python_command`.
        tool: ``"module:function"``; the function is called with ``amp_patch.session``, when the
            script has imported it, and finds ``options`` by `child.options`.
        options: what JSON can hold.
        opt_level: takes the place of the script's own; None leaves it.
        log: gets what the script prints.
        environment: variables added to this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        tool: str,
        options: Mapping[str, Any],
        log: Path,
        opt_level: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        added = {TOOL: tool, OPTIONS: json.dumps(dict(options)), **(environment or {})}
        self._log: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            list(command),
            env={**environment_of_run(os.environ, opt_level, force=True), **added},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches this process only, which ends the script in its own time.
            start_new_session=True,
        )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs; below 0, the signal that ended it."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the script and all that it has started: asked twice, then killed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.code is not None and number is not signal.SIGKILL:
                continue
            self._send(number)
            self.wait(GRACE)
        self.close()

    def kill(self) -> None:
        """End the script and all that it has started, without asking."""
        self._send(signal.SIGKILL)
        self._process.wait()
        self.close()

    def close(self) -> None:
        """The run is over; its log is complete."""
        self._log.close()

    def _send(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # all of the group has ended
