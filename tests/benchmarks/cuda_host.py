"""Measures the host's time of the optimizer phase on CUDA, without a GPU: no kernel runs.

    python tests/benchmarks/cuda_host.py
    python tests/benchmarks/cuda_host.py --model ResNet-50 --rounds 5 --out FILE

The phase is all that `amp` does from a backward to the next forward at O2 with ``fused_step=True``.
Tensors lie in the CPU's memory and pass for a GPU's. A launch packs its arguments and returns;
setting the device, the driver's call and allocation by CUDA are not in the numbers. Sizes of
tensors are cut down, for the host's time depends on how many there are.

A run takes the package beside it: to compare two versions, run it in two checkouts in turn. Times
are the thread's own, which other processes on the machine change little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.model_shapes import MODELS, Shape
from benchmarks.rounds import no_collection

from amp_patch import amp
from amp_patch.kernels import choice, cuda_module
from amp_patch.kernels.cuda_module import Argument, Kernel, packed
from amp_patch.step import loss_scaling

PARTS = ("zero_grad", "enter", "check", "clip", "step")
LARGE = 1 << 12  # as many elements are not small any more
#: After these steps no mistake is looked for, and all that is made once is there.
WARM_UP = 40


class NoLaunches:
    """Stands in for `cuda_module.modules`: kernels get their arguments, and do not run.

    Attributes:
        names: of the kernels that were launched, in order.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def failure(self, sources: Iterable[str], device: torch.device) -> None:
        """None fails."""

    def forget_failures(self) -> None:
        """Nothing can fail."""

    def launch(self, kernel: Kernel, grid: int, device: torch.device, *arguments: Argument) -> None:
        packed(kernel.parameters, arguments)
        self.names.append(kernel.name)
        if kernel.name == "summarize":  # the check has found nothing
            found_inf = arguments[4]
            assert isinstance(found_inf, Tensor)
            found_inf.zero_()


@contextlib.contextmanager
def gpu_without_kernels() -> Iterator[NoLaunches]:
    """Let the package take tensors of the CPU for a GPU's."""
    modules = NoLaunches()
    replaced: list[tuple[Any, str, Any]] = [
        (cuda_module, "modules", modules),
        (choice, "IS_CUDA", operator.attrgetter("is_cpu")),
        (loss_scaling, "RUNS_AHEAD", {"cpu"}),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield modules
    finally:
        try:
            amp.deactivate()
        finally:
            for owner, name, value in originals:
                setattr(owner, name, value)


def cut_down(shape: Shape) -> Shape:
    """Return a shape of as many dimensions, as small as its kind of memory allows."""
    if math.prod(shape) <= LARGE:
        return shape
    return (1,) * (len(shape) - 1) + (LARGE + 1,)


class Phase:
    """The phase of a model whose parameters have these shapes.

    Args:
        shapes: of the parameters.
        moves: whether gradients lie elsewhere in each step than in the one before.
    """

    def __init__(self, shapes: list[Shape], moves: bool) -> None:
        model = nn.ParameterList(torch.randn(shape) for shape in shapes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
        model, self._optimizer = amp.initialize(
            model, optimizer, opt_level="O2", fused_step=True, verbosity=0
        )
        self._params = list(model.parameters())
        self._memory = [
            [torch.full_like(param, 1e-4) for param in self._params] for _ in range(1 + moves)
        ]
        self._loss = torch.ones(())

    def _backward(self) -> None:
        self._memory.reverse()
        for param, one in zip(self._params, self._memory[0], strict=True):
            # as a backward does: another object, at an address that was used before
            new = torch.empty(0, dtype=one.dtype)
            param.grad = new.set_(one.untyped_storage(), 0, one.shape, one.stride())

    def times(self) -> list[float]:
        """Run the phase; return the seconds of each of `PARTS`."""
        block = amp.scale_loss(self._loss, self._optimizer)
        parts: list[Callable[[], object]] = [
            self._optimizer.zero_grad,
            block.__enter__,
            partial(block.__exit__, None, None, None),
            lambda: amp.clip_grad_norm_(self._optimizer, 1.0),
            self._optimizer.step,
        ]
        seconds = []
        for name, part in zip(PARTS, parts, strict=True):
            if name == "check":
                self._backward()
            start = time.thread_time()
            part()
            seconds.append(time.thread_time() - start)
        assert not amp.step_was_skipped(self._optimizer)
        return seconds


def measure(shapes: list[Shape], moves: bool, steps: int) -> dict[str, float]:
    """Return the median seconds of each part and of the phase, and how many kernels it launches."""
    with gpu_without_kernels() as modules:
        phase = Phase(shapes, moves)
        for _ in range(WARM_UP):
            phase.times()
        modules.names.clear()
        with no_collection():
            rows = [phase.times() for _ in range(steps)]
        launches = len(modules.names) / steps
    parts = dict(zip(PARTS, map(statistics.median, zip(*rows, strict=True)), strict=True))
    return parts | {"phase": statistics.median(map(sum, rows)), "launches": launches}


def as_table(measured: dict[str, dict[str, float]]) -> str:
    """Return milliseconds and launches, a line for each case."""
    names = (*PARTS, "phase")
    lines = [f"{'ms':40}" + "".join(f"{name:>10}" for name in (*names, "launches"))]
    for case, found in measured.items():
        times = "".join(f"{1e3 * found[name]:10.3f}" for name in names)
        lines.append(f"{case:40}{times}{found['launches']:10g}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), help="this one alone")
    parser.add_argument("--rounds", type=int, default=5, help="the median of so many is taken")
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name in [args.model] if args.model else ("BERT-large", "ResNet-50"):
            shapes = list(map(cut_down, MODELS[name]()))
            for moves, where in ((False, "at the same addresses"), (True, "elsewhere")):
                case = f"{name}, gradients {where}"
                rounds.setdefault(case, []).append(measure(shapes, moves, args.steps))
    measured = {
        case: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for case, found in rounds.items()
    }
    print(as_table(measured))
    if args.out is not None:
        result = {"machine": report.machine(), "measured": measured}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
