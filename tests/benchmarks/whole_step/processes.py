"""Asks a process of its own to train and time a candidate; knows nothing of how that is done.

In a process of its own, for the functions that amp_patch replaces are replaced for a whole process;
and an error on a GPU, or a capture that fails, ends what a process can do there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from benchmarks.rounds import Seconds
from benchmarks.whole_step.timing import Stepping, first_line

PROCESSES = multiprocessing.get_context("spawn")
#: What takes longer hangs: to import, to compile and to make the first steps, or to make a block.
PATIENCE: Seconds = 300.0


class Failed(Exception):
    """Nothing more comes from a caller, for this reason.

    Attributes:
        caller: who asked.
    """

    def __init__(self, caller: Caller, reason: str) -> None:
        super().__init__(reason)
        self.caller = caller


class Caller(Protocol):
    """Calls the methods of a `Stepping`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the method returns; raise `Failed` where it raises."""

    def end(self) -> None:
        """Give up all that it holds."""


class Process:
    """A `Caller` of a process that it starts."""

    def __init__(self, device: str, tiny: bool) -> None:
        self._answers, its = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_serve, args=(its, device, tiny), daemon=True)
        self.process.start()
        its.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """See `Caller`."""
        try:
            self._answers.send((method, arguments))
            if not self._answers.poll(PATIENCE):
                self.process.kill()
                raise Failed(self, f"no answer from {method}() within {PATIENCE:.0f} s")
            is_done, answer = self._answers.recv()
        except (EOFError, OSError):
            self.process.join(10)
            reason = f"its process ended with exit code {self.process.exitcode}"
            raise Failed(self, reason) from None
        if not is_done:
            raise Failed(self, answer)
        return answer

    def end(self) -> None:
        """See `Caller`."""
        self._answers.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(asked: Connection, device: str, tiny: bool) -> None:
    """Answer each call of a method: whether it could be done, and its result or the reason."""
    if device == "cpu":
        torch.set_num_threads(1)
    stepping: Stepping | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = asked.recv()
            try:
                stepping = stepping or Stepping(device, tiny)
                answer = True, getattr(stepping, method)(*arguments)
            except Exception as error:
                answer = False, first_line(error)
            asked.send(answer)
    if stepping is not None:
        stepping.drop()  # here, while nothing that it needs is torn down yet
