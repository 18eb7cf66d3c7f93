"""Two processes with a gloo process group, which run the functions that a test gives them.

They are forks of the server of `distributed.ranks`, which has imported torch.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distributed.ranks import IMPORTED

PATIENCE = 60  # seconds


class Pair:
    """Two processes, ranks 0 and 1, with the drop-in installed; ``with`` ends them.

    Args:
        folder: an empty one, where they find each other.
    """

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self._ends, self._processes = [], []
        for rank in (0, 1):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, str(folder / "store")))
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(rank, *args)`` returns in each process.

        Args:
            function: of a module that can be imported, without warnings.
            args: to be pickled.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, args)))
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} does not answer")
            answers.append(pickle.loads(end.recv_bytes()))
        for error, _ in answers:
            assert error is None, error
        return [result for _, result in answers]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()  # in a fork the end of a group of gloo may wait for ever
            process.join()
            end.close()


def _serve(end: Connection, rank: int, store: str) -> None:
    import torch.distributed as dist

    import amp_patch.apex

    amp_patch.apex.install(force=True)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    while True:
        end.send_bytes(pickle.dumps(_answer(end.recv_bytes(), rank)))


def _answer(request: bytes, rank: int) -> tuple[str | None, Any]:
    """Return the traceback if there is one, and the result."""
    import torch

    try:
        function, args = pickle.loads(request)
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return None, function(rank, *args)
    except BaseException:
        return traceback.format_exc(), None
