"""Measures whole training steps: fp32, TF32, torch's autocast, and amp_patch at every level.

    python tests/benchmarks/step.py
    python tests/benchmarks/step.py --minutes 9 --out FOLDER
    python tests/benchmarks/step.py --only bert --modes eager --candidates O2 "O2 fused_step"
    python tests/benchmarks/step.py --from FILE --plot docs/step.png
    python tests/benchmarks/step.py --device cpu --tiny

Every row is a model, a mode (eager, captured in a CUDA graph, or compiled) and a candidate. It is
compared with autocast and GradScaler, which take turns with it, in a process of their own. A row is
written as soon as it is there; one that is there is not measured again, so that a run that was cut
off goes on. The exit code is 1 where something that must be reached was not.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.whole_step import plot as step_plot
from benchmarks.whole_step import report as step_report
from benchmarks.whole_step.candidates import CANDIDATES, MODES
from benchmarks.whole_step.comparison import Comparison
from benchmarks.whole_step.models import MODELS
from benchmarks.whole_step.processes import Process
from benchmarks.whole_step.results import Results, about, differences, file_name
from benchmarks.whole_step.row import Key, Row
from benchmarks.whole_step.timing import STEPS, TINY_STEPS

RESULTS = Path(__file__).with_name("results")
NAMES = list(CANDIDATES)
#: Compiled come last, for to compile takes longer than to measure, and of these the most telling
#: candidates of all models first.
ORDER = (("eager", NAMES), ("graphed", NAMES), ("compiled", NAMES[:7]), ("compiled", NAMES[7:]))


def schedule() -> Iterator[Key]:
    """Yield all rows, what tells most first."""
    for mode, names in ORDER:
        for model in MODELS:
            for name in names:
                yield Key(mode, model, name)


def reason_against(key: Key, args: argparse.Namespace) -> str | None:
    """Return why a row is not to be measured; None if it is."""
    words = [word.lower() for word in args.only or [""]]
    is_asked = key.mode in args.modes and key.candidate in args.candidates
    if not is_asked or not any(word in key.model.lower() for word in words):
        return "not asked for"
    if key.mode == "graphed" and args.device != "cuda":
        return "there are CUDA graphs on a CUDA device only"
    if package := MODELS[key.model].missing():
        return f"{package} is missing"
    return None


def measures_again(row: Row, args: argparse.Namespace) -> bool:
    return args.again or (args.retry and row.error is not None)


def measure(results: Results, args: argparse.Namespace) -> None:
    """Measure the rows that are asked for and are not there, while there is time."""
    asked = []
    for key in schedule():
        if key in results.rows and not measures_again(results.rows[key], args):
            continue
        why = reason_against(key, args)
        asked += [] if why else [key]
        if key not in results.rows:
            results.missing[key] = why or "the run was cut off before"
    results.write()
    end = time.monotonic() + 60 * args.minutes
    comparison = Comparison(partial(Process, args.device, args.tiny), args.rounds)
    try:
        for key in asked:
            if time.monotonic() < end:
                results.add(comparison.row(key))
                print(line_of(results.rows[key]), flush=True)
            elif key in results.missing:
                results.missing[key] = f"the {args.minutes:g} minutes were over"
    finally:
        comparison.end()
    results.write()


def line_of(row: Row) -> str:
    """Return what is printed of a row as soon as it is there."""
    if row.own is None:
        return f"{row.key}: {row.error}"
    speed, memory = row.ratio("speed"), row.ratio("peak_bytes")
    ratios = [f"{speed:.2f} x speed"] + ([] if memory is None else [f"{memory:.2f} x memory"])
    return f"{row.key}: {row.own.samples_per_second:.1f} samples/s, {', '.join(ratios)}"


def results_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Results:
    """Return what is there of this machine, or nothing yet."""
    found = about(torch.device(args.device), args.tiny, TINY_STEPS if args.tiny else STEPS)
    path = args.out and args.out / file_name(found)
    if path is None or not path.exists():
        return Results(path, found)
    results = Results.read(path)
    if other := differences(results.about, found):
        if not args.again:
            parser.error(
                f"rows of one file must be of one machine and one set of versions; got "
                f"{path.name} with {'; '.join(other)}. Give another --out, or --again, which "
                "leaves all of its rows out."
            )
        return Results(path, found)
    results.about = found  # the date of its newest row
    return results


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models, a few steps: a test")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have a word")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--candidates", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of steps of each")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="after these no row is begun"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--retry", action="store_true", help="... of that, what has failed")
    parser.add_argument(
        "--out", type=Path, help="the folder to write to; with --tiny nothing is written without it"
    )
    parser.add_argument("--from", dest="source", type=Path, help="show this JSON, measure nothing")
    parser.add_argument("--plot", type=Path, help="a file for the plot; needs matplotlib")
    args = parser.parse_args(arguments)
    measures_on_gpu = args.source is None and args.device == "cuda"
    if measures_on_gpu and not torch.cuda.is_available():
        parser.error("there must be a CUDA device; got none. Give --device cpu --tiny for a test.")
    if args.out is None and not args.tiny:
        args.out = RESULTS
    return args, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show and write; return the exit code."""
    args, parser = parse(arguments)
    if args.source is not None:
        results = Results.read(args.source)
    else:
        if args.device == "cuda":
            prepare_environment()
        results = results_of(args, parser)
        measure(results, args)
    print(f"\n{results.as_text()}")
    if args.plot is not None:
        step_plot.draw(results, args.plot)
    missed = [] if results.about["tiny"] else step_report.missed(results.rows)
    errors = sum(row.error is not None for row in results.rows.values())
    print(*missed, sep="\n", end="\n" if missed else "")
    print(
        f"{len(results.rows) - errors} rows measured, {errors} could not be, "
        f"{len(results.missing)} not tried; {len(missed)} targets missed"
    )
    return 1 if missed else 0


def prepare_environment() -> None:
    """Set what the processes that measure inherit."""
    if importlib.util.find_spec("cupy"):
        os.environ.setdefault("AMP_PATCH_KERNELS", "cupy")  # else a failure had torch measured
    # CUPTI, by which launches are counted, slows them down as long as it is there.
    os.environ.setdefault("TEARDOWN_CUPTI", "1")


if __name__ == "__main__":
    sys.exit(main())
