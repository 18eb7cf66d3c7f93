"""Starts a script once per GPU: ``python -m apex.parallel.multiproc script.py ARGS``."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence

import torch


def main(args: Sequence[str]) -> int:
    """Run ``python ARGS --world-size N --rank R`` for each rank, and wait for all.

    Rank 0 prints here, rank R into the file ``GPU_R.log``. A ``--world-size`` in ``args`` decides
    how many there are; else the GPUs, and one where there are none.

    Args:
        args: a script and its arguments, a ``--rank`` among them is replaced.

    Returns:
        0, or the first exit code that is another.
    """
    command = list(args)
    if "--world-size" in command:
        world_size = int(command[command.index("--world-size") + 1])
    else:
        world_size = max(1, torch.cuda.device_count())
        command += ["--world-size", str(world_size)]
    if "--rank" not in command:
        command += ["--rank", "0"]
    place = command.index("--rank") + 1
    with contextlib.ExitStack() as files:
        workers = []
        for rank in range(world_size):
            command[place] = str(rank)
            log = files.enter_context(open(f"GPU_{rank}.log", "w")) if rank else None
            workers.append(subprocess.Popen([sys.executable, *command], stdout=log))
        codes = [worker.wait() for worker in workers]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
