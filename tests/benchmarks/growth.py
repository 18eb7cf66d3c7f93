"""Measures how a step's host time grows with the number of parameters, and of modules.

    python tests/benchmarks/growth.py
    python tests/benchmarks/growth.py --most 1000 --out FILE --plot FILE

Each size is timed in turn for all candidates, in this one process, by the thread's own time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.host_models import Concatenated, HostModel, regression
from benchmarks.host_rows import step_of
from benchmarks.host_steps import WARM_UP
from benchmarks.rounds import Seconds, interleave, median_time

CANDIDATES = ("autocast fp16", "bare fp16", "O1", "O2", "O2 fused_step")


def parameters(count: int) -> HostModel:
    return regression(Concatenated(count), torch.randn(2, 4 * count), torch.randn(2))


def modules(count: int) -> HostModel:
    layers = (nn.Linear(4, 4) for _ in range(count))
    return regression(nn.Sequential(*layers), torch.randn(2, 4), torch.randn(2, 4))


#: What grows -> how a model of a size is made, and the sizes.
SERIES: dict[str, tuple[Callable[[int], HostModel], tuple[int, ...]]] = {
    "parameters": (parameters, (10, 100, 1_000, 10_000)),
    "modules": (modules, (1, 10, 100, 1_000)),
}


def timed(name: str, make: Callable[[], HostModel], steps: int) -> Seconds:
    with step_of(name, make, lambda model: model) as step:
        return median_time(step, WARM_UP, steps, time.thread_time)


def measure(most: int, rounds: int) -> dict[str, dict[str, dict[str, Seconds]]]:
    """Return series -> candidate -> size -> the least of the rounds' seconds of a step."""
    measured: dict[str, dict[str, dict[str, Seconds]]] = {}
    for series, (make, sizes) in SERIES.items():
        measured[series] = {name: {} for name in CANDIDATES}
        for size in (size for size in sizes if size <= most):
            steps = max(3, 2_000 // size)
            candidates = {
                name: partial(timed, name, partial(make, size), min(steps, 40))
                for name in CANDIDATES
            }
            seconds = interleave(candidates, rounds, lambda: None)
            for name, values in seconds.items():
                measured[series][name][str(size)] = min(values)
            print(series, size, {name: f"{min(v) * 1e6:.0f} us" for name, v in seconds.items()})
    return measured


def draw(measured: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(measured), figsize=(11, 4.5), layout="constrained")
    for axis, (series, lines) in zip(axes, measured.items(), strict=True):
        for name, points in lines.items():
            sizes = [int(size) for size in points]
            each = [1e6 * seconds / int(size) for size, seconds in points.items()]
            axis.loglog(sizes, each, "o-", label=name)
        axis.set(
            xlabel=f"{series} of the model", ylabel=f"microseconds of a step, per {series[:-1]}"
        )
        axis.legend()
    plt.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=10_000, help="leave out larger models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    parser.add_argument("--plot", type=Path, help="a file for the plot; needs matplotlib")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(args.most, args.rounds)
    if args.out is not None:
        result = {"machine": report.machine(), "seconds": measured}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(measured, args.plot)


if __name__ == "__main__":
    main()
