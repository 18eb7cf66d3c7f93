"""Compares steps at O2 and O5 with those written by hand, of two models that take turns.

    python tests/benchmarks/host_in_turn.py
    python tests/benchmarks/host_in_turn.py --only linears penalty --blocks 400

A block is five steps of the one model, then five of the other: five milliseconds, in which a noisy
machine is the same for both. Ratios of the thread's own time; the median of all blocks. The steps
by hand are made without the hooks that amp_patch has on the steps of all optimizers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import host_steps, report
from benchmarks.host_models import MODELS, HostModel
from benchmarks.host_rows import RATIOS, step_of
from benchmarks.rounds import Spread, no_collection

BY_HAND = [(ours, bare) for ours, bare in RATIOS if bare.startswith("bare")]
#: More than the steps in which amp_patch looks for mistakes.
WARM_UP = host_steps.WARM_UP
STEPS = 5


def compare(make: Callable[[], HostModel], ours: str, theirs: str, blocks: int) -> Spread:
    """Return the ratios of the blocks' times."""
    clock = time.thread_time
    with step_of(theirs, make, _eager) as bare, step_of(ours, make, _eager) as step:
        for _ in range(WARM_UP):
            bare()
            step()
        found = []
        with no_collection():
            for _ in range(blocks):
                with _no_hooks():
                    start = clock()
                    for _ in range(STEPS):
                        bare()
                    by_hand = clock() - start
                start = clock()
                for _ in range(STEPS):
                    step()
                found.append((clock() - start) / by_hand)
    return Spread.of(found)


@contextlib.contextmanager
def _no_hooks() -> Iterator[None]:
    """Let optimizers step without the hooks that are on all of them."""
    hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    yield
    for one, own in zip(hooks, kept, strict=True):
        one.update(own)


def _eager(model: torch.nn.Module) -> torch.nn.Module:
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have a word")
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    args = parser.parse_args()
    words = [word.lower() for word in args.only or [""]]
    torch.set_num_threads(1)
    ratios: dict[str, dict[str, Spread]] = {}
    rows = [
        (name, pair) for name in MODELS for pair in BY_HAND if any(w in name.lower() for w in words)
    ]
    for name, (ours, theirs) in track(rows, disable=args.quiet):
        spread = compare(MODELS[name], ours, theirs, args.blocks)
        ratios.setdefault(name, {})[f"{ours} / {theirs}"] = spread
    table = Table(
        "median (quartiles) of the blocks' ratios", *[" / ".join(pair) for pair in BY_HAND]
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
