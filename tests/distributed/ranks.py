"""Runs a function on several ranks: processes of this machine with a gloo process group.

A rank is a fork of a server that has imported torch once, so that one costs a fraction of a second.
The ranks find each other by a file, so that no port is needed. None outlives the call of `run`, or
the block of `Ranks`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds
#: How long the other ranks may go on when one has failed: their own errors are worth reading.
GRACE = 3.0
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch._dynamo",
    "amp_patch.amp",
)


class RankError(AssertionError):
    """What went wrong, by rank.

    Attributes:
        errors: rank -> the traceback of what it raised, or what it was seen doing at the end.
        results: rank -> what it returned, of the ranks that did.
    """

    def __init__(self, errors: dict[int, str], results: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors, self.results = errors, results


def run(
    function: Callable[..., Any],
    *args: Any,
    size: int = 2,
    timeout: float = TIMEOUT,
    collective_timeout: float | None = None,
    backend: str = "gloo",
    **options: Any,
) -> list[Any]:
    """Return what ``function(*args, **options)`` returns on each rank, in the order of the ranks.

    Args:
        function: found by its module and name, in which ``torch.distributed`` is initialized.
        args, options: to be pickled, as are the results.
        size: how many ranks.
        timeout: seconds for all of it.
        collective_timeout: seconds for each collective; None: as many.
        backend: of the process group.

    Raises:
        RankError: a rank raised, died, or is not done in time.
    """
    with Ranks(size, collective_timeout or timeout, backend) as started:
        return started.run(function, *args, timeout=timeout, **options)


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Ranks that run one function after another in the same process group, until they are closed.

    Args:
        size: how many.
        collective_timeout: seconds for each collective.
        backend: of the process group.
    """

    def __init__(
        self, size: int = 2, collective_timeout: float = TIMEOUT, backend: str = "gloo"
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            here, there = context.Pipe()
            place = (there, rank, size, self._folder.name, collective_timeout, backend)
            process = context.Process(target=_be_rank, args=place, daemon=True)
            process.start()
            there.close()
            self._started.append((process, here))

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **options: Any
    ) -> list[Any]:
        """Return the results as `run` does; after an error of it the ranks can only be closed."""
        call = pickle.dumps((function, args, options))
        ends = [end for _, end in self._started]
        for end in ends:
            with contextlib.suppress(BrokenPipeError):  # it has died, which `_collect` tells
                end.send_bytes(call)
        return _collect(ends, timeout, Path(self._folder.name))

    def close(self) -> None:
        """End the processes."""
        for process, end in self._started:
            process.kill()
            process.join()
            end.close()
        self._started.clear()
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


def torchrun(*arguments: object, timeout: float = 300.0, **env: str) -> tuple[int, str, str]:
    """Return the exit code of a script under ``torchrun``, what it printed, and its errors.

    Its workers are sessions of their own, which torchrun ends where it is asked to end itself.

    Args:
        arguments: torchrun's, the script's path, and those of the script.
        timeout: seconds.
        env: further variables.

    Raises:
        subprocess.TimeoutExpired: it is not done in time; nothing of it is left then.
    """
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    try:
        output, errors = started.communicate(timeout=timeout)
    except BaseException:
        started.terminate()
        try:
            started.communicate(timeout=TIMEOUT)
        finally:
            started.kill()
        raise
    return started.returncode, output, errors


def _collect(ends: Sequence[Connection], timeout: float, folder: Path) -> list[Any]:
    """Return the results, or raise when a rank failed and the others had time to say so, too."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                error, result = pickle.loads(end.recv_bytes())
            except (EOFError, ConnectionResetError):
                error, result = "died without a word", None
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting.values():
        errors[rank] = f"was not done in time; it was here:\n{_stack_of(folder, rank)}"
    if errors:
        raise RankError(dict(sorted(errors.items())), results)
    return [results[rank] for rank in range(len(ends))]


def _be_rank(
    end: Connection, rank: int, size: int, folder: str, timeout: float, backend: str
) -> None:
    import torch

    stack = open(_stack_file(Path(folder), rank), "w")  # noqa: SIM115  # until the process ends
    (Path(folder) / f"{rank}.pid").write_text(str(multiprocessing.current_process().pid))
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(1)
    gc.freeze()  # as `conftest` does: a search through all objects is to pass over the imported
    while True:
        try:
            function, args, options = pickle.loads(end.recv_bytes())
        except (EOFError, ConnectionResetError):
            return  # whoever started it is gone
        try:
            if not torch.distributed.is_initialized():
                _join(rank, size, folder, timeout, backend)
            torch.manual_seed(0)
            answer = pickle.dumps((None, function(*args, **options)))
        except BaseException:
            end.send_bytes(pickle.dumps((traceback.format_exc(), None)))
            return  # which the others notice
        end.send_bytes(answer)
    # The process group is not destroyed: in a fork gloo's threads may wait for ever then.


def _join(rank: int, size: int, folder: str, timeout: float, backend: str) -> None:
    """Find the other ranks by a file of the folder."""
    import torch

    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stack"


def _stack_of(folder: Path, rank: int) -> str:
    """Ask a rank where it is."""
    try:
        os.kill(int((folder / f"{rank}.pid").read_text()), signal.SIGUSR1)
        deadline = time.monotonic() + GRACE
        while not (stack := _stack_file(folder, rank).read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return stack
    except (OSError, ValueError):
        return "nowhere: it is gone"
