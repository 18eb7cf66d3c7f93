"""Measures amp_patch against torch's own tools and compares with what must be reached.

    python tests/benchmarks/run.py
    python tests/benchmarks/run.py --only casts host
    python tests/benchmarks/run.py --write-docs

Times are ratios of runs in this one process, on one thread, taken in turn, round by round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import casts, host, report, startup
from benchmarks.host_steps import WARM_UP
from benchmarks.report import Row
from benchmarks.rounds import Spread, ratio
from casting_support import half_kernels_as_on_cuda

MILLISECOND = 1e-3


def cast_rows(args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Count casts; a count has no spread."""
    bar = progress.add_task("counting casts", total=7)
    cuda_list = casts.autocast_casts(cuda_list=True)
    progress.advance(bar)
    cpu_list = casts.autocast_casts(cuda_list=False)
    progress.advance(bar)
    (plain,) = casts.amp_casts()
    progress.advance(bar)
    _, second = casts.amp_casts(micro_batches=2)
    progress.advance(bar)
    (recomputed,) = casts.amp_casts(recompute=True)
    progress.advance(bar)
    (fast_norms,) = casts.amp_casts(rules="fast-norms")
    progress.advance(bar)
    with half_kernels_as_on_cuda():
        (on_cuda,) = casts.amp_casts(rules="fast-norms")
    progress.advance(bar)
    return [
        Row("casts, autocast by CUDA's list", cuda_list.total),
        Row("casts, autocast by the CPU's list", cpu_list.total),
        Row("casts, O1", plain.total, at_most=552),
        Row("... of weights", plain.of_weights, at_most=0),
        Row("... of weights, second micro-batch", second.of_weights, at_most=0),
        Row("bulk refreshes, second micro-batch", second.bulk_copies, at_most=0),
        Row("... of weights, recomputed step", recomputed.of_weights, at_most=0),
        Row("casts, O1 with fast-norms", fast_norms.total, at_most=485),
        Row("... as on CUDA", on_cuda.total, at_most=391),
    ]


def host_rows(args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Time a host-bound step."""
    rounds = 1 if args.quick else 81
    bar = progress.add_task("timing host-bound steps", total=rounds)
    seconds = host.measure(
        rounds,
        warm_up=2 if args.quick else WARM_UP,
        steps=3 if args.quick else 40,
        on_round=lambda: progress.advance(bar),
    )
    baseline = Spread.of(seconds[host.AUTOCAST]).scaled(MILLISECOND)
    rows = [Row(f"step, {host.AUTOCAST}", baseline, "ms")]
    for level, at_most in (("O1", 1.0), ("O2", 0.85)):
        spread = ratio(seconds, level, host.AUTOCAST)
        rows.append(Row(f"step, {level} against that", spread, "x", at_most))
    return rows


def startup_rows(args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Time ``initialize``."""
    rounds = 1 if args.quick else 11
    bar = progress.add_task("timing initialize", total=rounds)
    seconds = startup.measure(
        rounds, width=24 if args.quick else 768, on_round=lambda: progress.advance(bar)
    )
    times = {name: Spread.of(values).scaled(MILLISECOND) for name, values in seconds.items()}
    rows = [Row(f"initialize, {startup.PATCHING}", times[startup.PATCHING], "ms", 50)]
    for level in ("O0", "O1", "O4"):
        rows.append(Row(f"initialize, 109 M weights, {level}", times[level], "ms", 500))
    rows.append(Row(startup.HALF, times[startup.HALF], "ms"))
    for level in ("O2", "O3", "O5"):
        spread = ratio(seconds, level, startup.HALF)
        rows.append(Row(f"initialize, {level} against that", spread, "x", 1.5))
    return rows


PARTS = {"casts": cast_rows, "host": host_rows, "startup": startup_rows}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="one round and small models, to see that it runs"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write the table there, and results/cpu.json"
    )
    args = parser.parse_args()
    if args.write_docs and (args.quick or len(args.only) < len(PARTS)):
        parser.error("--write-docs needs the whole measurement; leave out --quick and --only")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    with Progress() as progress:
        rows = [row for name in args.only for row in PARTS[name](args, progress)]
    Console().print(report.as_table(rows))
    if args.write_docs:
        report.save(rows)
        report.write_page(rows)


if __name__ == "__main__":
    main()
