"""Measures what a step costs the host, on small models of several kinds, against torch's own.

    python tests/benchmarks/host_rows.py
    python tests/benchmarks/host_rows.py --only linears conv --rounds 41
    python tests/benchmarks/host_rows.py --compile --rounds 5
    python tests/benchmarks/host_rows.py --optimizer SGD
    python tests/benchmarks/host_rows.py --micro-batches 4
    python tests/benchmarks/host_rows.py --architectures --cpu-time
    python tests/benchmarks/host_rows.py --middle --candidates "autocast bf16" O4 O5
    python tests/benchmarks/host_rows.py --from FILE --plot FILE

Ratios of medians, of steps taken in turn in this one process on one thread. "bare" is written by
hand for the model. "by the CPU's list" is O1 or O4 in which no more functions run in fp32 than
under torch's autocast on a CPU. ``--cpu-time`` takes the thread's own time, where the machine is
shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import architectures, host_steps, middle_models, report
from benchmarks.host_models import MODELS, HostModel, gradient_penalty
from benchmarks.rounds import Seconds, Spread, interleave, median_time, ratio

#: What is measured, against what.
RATIOS = (
    ("bare fp16", "autocast fp16"),
    ("bare bf16", "autocast bf16"),
    ("O1", "autocast fp16"),
    ("O2", "bare fp16"),
    ("O2 fused_step", "bare fp16"),
    ("O4", "autocast bf16"),
    ("O5", "bare bf16"),
    ("O5 fused_step", "bare bf16"),
    ("O1 by the CPU's list", "autocast fp16"),
    ("O4 by the CPU's list", "autocast bf16"),
)
#: What a user asks first.
AGAINST_AUTOCAST = (
    ("O1", "autocast fp16"),
    ("O2", "autocast fp16"),
    ("O4", "autocast bf16"),
    ("O5", "autocast bf16"),
)
CANDIDATES = list(dict.fromkeys(name for pair in RATIOS for name in pair))


def step_of(
    name: str,
    make: Callable[[], HostModel],
    compiled: host_steps.Compile,
    optimizer: str = "AdamW(fused=True)",
    batches: host_steps.Batches = host_steps.ONE_BATCH,
) -> contextlib.AbstractContextManager[host_steps.Step]:
    kind, _, rest = name.partition(" ")
    steps = host_steps.OPTIMIZERS[optimizer]
    if kind == "autocast":
        return host_steps.autocast(make, rest, compiled, steps, batches)
    if kind == "bare":
        return host_steps.bare(make, rest, compiled, steps, batches)
    rules = host_steps.rules_of_cpu_autocast() if rest == "by the CPU's list" else None
    fused_step = rest == "fused_step"
    return host_steps.amp_patch(
        make, kind, compiled, steps, batches, fused_step=fused_step, rules=rules
    )


def candidate(name: str, make: Callable[[], HostModel], args: argparse.Namespace) -> Seconds:
    compiled = torch.compile if args.compile else lambda model: model
    clock = time.thread_time if args.cpu_time else time.perf_counter
    if args.compile:
        torch.compiler.reset()  # of one function torch compiles eight variants, and then no more
    batches = host_steps.Batches(args.micro_batches, args.unscale_each)
    with step_of(name, make, compiled, args.optimizer, batches) as step:
        return median_time(step, host_steps.WARM_UP, args.steps, clock)


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[Seconds]]]:
    """Return model -> what is measured -> the median seconds of a step in each round."""
    measured = {}
    with Progress(disable=args.quiet) as progress:
        for name, make in args.models.items():
            bar = progress.add_task(name, total=args.rounds)
            timed = {one: partial(candidate, one, make, args) for one in args.candidates}
            measured[name] = interleave(timed, args.rounds, partial(progress.advance, bar))
    return measured


def ratios(
    measured: dict[str, dict[str, list[Seconds]]], pairs: Sequence[tuple[str, str]] = RATIOS
) -> dict[str, dict[str, Spread]]:
    return {
        model: {
            f"{ours} / {theirs}": ratio(seconds, ours, theirs)
            for ours, theirs in pairs
            if ours in seconds and theirs in seconds
        }
        for model, seconds in measured.items()
    }


def as_table(measured: dict[str, dict[str, list[Seconds]]]) -> Table:
    """Show the median of the rounds' ratios, and the ratio of the least times."""
    found = ratios(measured)
    columns = list(dict.fromkeys(name for row in found.values() for name in row))
    table = Table("median of the rounds' ratios; of the least times", *columns)
    for model, row in found.items():
        seconds = measured[model]
        cells = []
        for name in columns:
            ours, theirs = name.split(" / ")
            least = min(seconds[ours]) / min(seconds[theirs])
            cells.append(f"{row[name].median:.3f}; {least:.3f}")
        table.add_row(model, *cells)
    return table


def save(path: Path, measured: dict[str, dict[str, list[Seconds]]], optimizer: str) -> None:
    least = {
        model: {name: min(values) for name, values in seconds.items()}
        for model, seconds in measured.items()
    }
    result = {
        "machine": report.machine(),
        "optimizer": optimizer,
        "ratios": _as_json(ratios(measured)),
        "against autocast": _as_json(ratios(measured, AGAINST_AUTOCAST)),
        "least seconds": least,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _as_json(found: dict[str, dict[str, Spread]]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        model: {name: vars(spread) for name, spread in row.items()} for model, row in found.items()
    }


def draw(saved: Path, path: Path) -> None:
    """Draw what `save` wrote: each level's step against autocast's, median and quartiles."""
    import matplotlib.pyplot as plt

    found = json.loads(saved.read_text(encoding="utf-8"))["against autocast"]
    levels = list(next(iter(found.values())))
    _, axes = plt.subplots(figsize=(9, 0.9 * len(found) + 1.2), layout="constrained")
    for place, level in enumerate(levels):
        spreads = [row[level] for row in found.values()]
        medians = [one["median"] for one in spreads]
        below = [one["median"] - one["lower"] for one in spreads]
        above = [one["upper"] - one["median"] for one in spreads]
        rows = [
            row + (place - (len(levels) - 1) / 2) / (len(levels) + 2) for row in range(len(found))
        ]
        axes.errorbar(medians, rows, xerr=[below, above], fmt="o", label=level.partition(" / ")[0])
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="host time of a step; torch.autocast in the same half dtype takes 1")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    plt.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models whose names have a word")
    parser.add_argument(
        "--architectures", action="store_true", help="models of Hugging Face's transformers instead"
    )
    parser.add_argument(
        "--middle", action="store_true", help="models of 0.3 to 2 million parameters instead"
    )
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=CANDIDATES)
    kinds = list(host_steps.OPTIMIZERS)
    parser.add_argument("--optimizer", choices=kinds, default=kinds[0], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="timed in each round")
    parser.add_argument("--cpu-time", action="store_true", help="see above")
    host_steps.add_batches(parser)
    parser.add_argument("--compile", action="store_true", help="torch.compile all models")
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--from", dest="saved", type=Path, help="measure nothing, but draw this")
    parser.add_argument("--plot", type=Path, help="a file for the plot of --out or --from")
    args = parser.parse_args()
    if args.plot is not None and (args.out is None) == (args.saved is None):
        parser.error("--plot draws what --out or --from names; give one of them")
    chosen = [word.lower() for word in args.only or [""]]
    models = MODELS
    if args.architectures or args.middle:
        models = architectures.MODELS if args.architectures else middle_models.MODELS
    args.models = {
        name: make
        for name, make in models.items()
        if any(word in f"{name} {getattr(make, '__name__', '')}".lower() for word in chosen)
        and not (args.compile and make is gradient_penalty)  # torch compiles no double backward
    }
    if not args.models:
        parser.error(f"--only must name models; got {args.only}; they are {', '.join(models)}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.saved is None:
        torch.set_num_threads(1)
        measured = measure(args)
        Console(width=200).print(as_table(measured))
        if args.out is not None:
            save(args.out, measured, args.optimizer)
    if args.plot is not None:
        draw(args.saved or args.out, args.plot)


if __name__ == "__main__":
    main()
