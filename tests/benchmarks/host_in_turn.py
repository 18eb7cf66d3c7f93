"""Compares steps of two processes that take turns: at a level, and by autocast or by hand.

    python tests/benchmarks/host_in_turn.py
    python tests/benchmarks/host_in_turn.py --only linears penalty --pairs 10

A block is five steps in the one process, then five in the other: milliseconds, in which a noisy
machine is the same for both. Ratios of the thread's own time; the median of all blocks. Where the
system can, all processes run on one processor. Each pair of processes lives for a part of the
blocks only: where a process happens to lie in memory is worth a few per cent of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import host_steps, report
from benchmarks.host_models import MODELS
from benchmarks.host_rows import RATIOS, step_of
from benchmarks.rounds import Seconds, Spread, no_collection

STEPS = 5
PROCESSES = multiprocessing.get_context("spawn")


def compare(model: str, ours: str, theirs: str, blocks: int, pairs: int) -> Spread:
    """Return the ratios of the blocks' times.

    Args:
        model: a name in `MODELS`.
        ours: what is compared, as in `RATIOS`; so ``theirs``.
        blocks: of each pair of processes.
        pairs: of processes, one after the other.
    """
    found: list[float] = []
    for _ in range(pairs):
        with _stepping(model, ours) as one, _stepping(model, theirs) as other:
            found += [_block(one) / _block(other) for _ in range(blocks)]
    return Spread.of(found)


@contextlib.contextmanager
def _stepping(model: str, candidate: str) -> Iterator[Connection]:
    """Start a process that makes a block of steps each time it is told to."""
    own, its = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(its, model, candidate), daemon=True)
    process.start()
    its.close()
    try:
        own.recv()
        yield own
    finally:
        own.close()
        process.join()


def _block(process: Connection) -> Seconds:
    process.send(None)
    return float(process.recv())


def _serve(asked: Connection, model: str, candidate: str) -> None:
    """Make the steps of a block for each message, and answer with their time."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    with step_of(candidate, MODELS[model], lambda module: module) as step, no_collection():
        for _ in range(host_steps.WARM_UP):
            step()
        asked.send(None)
        with contextlib.suppress(EOFError):
            while True:
                asked.recv()
                start = time.thread_time()
                for _ in range(STEPS):
                    step()
                asked.send(time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have a word")
    parser.add_argument("--blocks", type=int, default=40, help="of each pair of processes")
    parser.add_argument("--pairs", type=int, default=3, help="of processes, one after the other")
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    args = parser.parse_args()
    words = [word.lower() for word in args.only or [""]]
    ratios: dict[str, dict[str, Spread]] = {}
    rows = [
        (name, pair)
        for name, make in MODELS.items()
        for pair in RATIOS
        if any(word in f"{name} {make.__name__}".lower() for word in words)
    ]
    for name, (ours, theirs) in track(rows, disable=args.quiet):
        spread = compare(name, ours, theirs, args.blocks, args.pairs)
        ratios.setdefault(name, {})[f"{ours} / {theirs}"] = spread
    table = Table(
        "median (quartiles) of the blocks' ratios", *[" / ".join(pair) for pair in RATIOS]
    )
    for name, row in ratios.items():
        cells = [f"{one.median:.3f} ({one.lower:.2f}-{one.upper:.2f})" for one in row.values()]
        table.add_row(name, *cells)
    Console(width=200).print(table)
    if args.out is not None:
        spreads = {
            name: {key: vars(one) for key, one in row.items()} for name, row in ratios.items()
        }
        result = {"machine": report.machine(), "ratios": spreads}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
