"""Runs a user's script in a process of its own, with one of the tools attached to its training.

Knows processes, signals and environments; what is observed in the script, and what is made of it,
is the tools' own. Imports no torch: the script's process does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from amp_patch.apex.process import environment_of_run, is_for_python, program_named

from .attach import OPTIONS as OPTIONS
from .attach import PARENT
from .attach import TOOL as TOOL
from .crash import crash_reason
from .early_notice import NAME as NOTE
from .errors import BadArguments, refuse_notebook
from .idle import IdleWatch, descendants
from .process import Start, start_process
from .untrained import is_runnable, is_to_end, notice, reason_after

#: Seconds that a script gets to end by itself after each of the signals that ask it to.
GRACE = 5.0
#: Seconds between two looks at a script that runs.
PAUSE = 0.2
#: What ends a command, and the script with it.
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupted(KeyboardInterrupt):
    """A signal asks this process to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM, and the end of the terminal, do what Ctrl-C does: raise KeyboardInterrupt.

    A script is in a process group of its own, which gets no such signal, and must not outlive us.
    What is ignored (under ``nohup``) is ignored still.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    deaf = (signal.SIG_IGN, None)  # None: a handler that Python cannot put back
    heard = [number for number in numbers if signal.getsignal(number) not in deaf]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> None:
    raise Interrupted(number)


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that an interruption ended, as a shell tells it."""
    return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the files of runs, and remove it with all of them."""
    with tempfile.TemporaryDirectory(prefix="amp-patch-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def python_command(words: Sequence[str]) -> list[str]:
    """Return the command that runs what stands after ``--``.

    Args:
        words: ``script.py ARGS``, ``-m module ARGS``, or a program that starts Python processes of
            this environment (``torchrun --nproc_per_node 2 script.py``, ``./train.sh``).

    Raises:
        BadArguments: there is no such script or program, or it is a notebook.
    """
    if not words or words == ["-m"]:
        raise BadArguments("a script must stand after --; got none; write -- train.py ARGS")
    first = words[0]
    refuse_notebook(first)
    if first == "-m" or is_for_python(first):
        return [sys.executable, *words]
    program = program_named(first)
    if program is None:
        raise BadArguments(
            f"what stands after -- must be a script; got {first}, which is no file"
            + (f"; did you mean -m {first}?" if is_runnable(first) else "")
        )
    return [program, *words[1:]]


def filled(command: Sequence[str], level: str, run: str) -> list[str]:
    """Return a command with ``{level}`` and ``{run}`` in its words replaced."""
    return [word.replace("{level}", level).replace("{run}", run) for word in command]


class ScriptRun:
    """One run of a script, in a process group of its own; a ``with`` block that is left ends it.

    Args:
        command: of `python_command`.
        tool: ``"module:function"``; the function is called with ``amp_patch.session``, when the
            script has imported it, and finds ``options`` by `child.options`.
        options: what JSON can hold; "out" is the folder that the tool writes to.
        log: gets what the script prints.
        opt_level: takes the place of the script's own; None leaves it.
        environment: variables added to this process's.
        start: see `start_process`.
    """

    def __init__(
        self,
        command: Sequence[str],
        tool: str,
        options: Mapping[str, Any],
        log: Path,
        opt_level: str | None = None,
        environment: Mapping[str, str] | None = None,
        start: Start = start_process,
    ) -> None:
        folder = Path(options["out"])
        self._note = folder / NOTE
        added = {TOOL: tool, OPTIONS: json.dumps(dict(options)), PARENT: str(os.getpid())}
        added |= environment or {}
        self.log = log
        whole = {**environment_of_run(os.environ, opt_level, force=True), **added}
        self._process = start(command, whole, log)
        self._idle = IdleWatch(self._process.pid, folder)

    def __enter__(self) -> ScriptRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            if self.code != 0:
                self.stop()
        except KeyboardInterrupt:
            if not isinstance(error, KeyboardInterrupt):
                raise

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs; below 0, the signal that ended it."""
        return self._process.poll()

    def steps_without_amp(self) -> int:
        """Return how many steps the script has made without amp, 0 where it noted none."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._note.read_text(encoding="utf-8"))
        return 0

    def is_idle(self) -> bool:
        """Return whether the script waits for a process of its own that was told to end."""
        return self._idle.is_idle()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the script and all that it has started: asked twice, then killed.

        An interruption meanwhile kills it at once, and is raised.
        """
        # a launcher such as torchrun gives each of its workers a group
        groups = {self._process.pid, *(one.group for one in descendants(self._process.pid))}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if self.code is None:
                    _send(number, self._process.pid)
                    self.wait(GRACE)
        finally:
            for group in groups:
                _send(signal.SIGKILL, group)
            self._process.wait()


def _send(number: signal.Signals, group: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended
        os.killpg(group, number)


@functools.cache
def say(line: str) -> None:
    """Print a line on the error stream, once in this process."""
    click.echo(line, err=True)


def run_to_end(run: ScriptRun, timeout: float | None = None) -> str | None:
    """Wait for a script to end, and return why it failed; None where it did not.

    Args:
        run: has just begun; it is over when this returns or raises.
        timeout: seconds after which it is ended; None for none.

    Raises:
        BadArguments: it was ended, for it had made many steps and not begun to use amp.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with run:
        while run.wait(PAUSE) is None:
            if steps := run.steps_without_amp():
                if is_to_end(steps):
                    raise BadArguments(reason_after(steps))
                say(notice(steps))
            if run.is_idle():
                say("The script was ended, for it only waited for a process that has its steps.")
                return None
            if end is not None and time.monotonic() > end:
                return f"took longer than {timeout:.0f} s"
    return crash_reason(run.code, run.log) if run.code else None
