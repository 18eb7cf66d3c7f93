"""Counts the collectives of a step on several ranks, and what they send, and times the step.

    python tests/benchmarks/distributed.py --write-docs
    python tests/benchmarks/distributed.py --device cuda --ranks 2 4 8

Each engine's candidates run in turn, in the same processes: float16 by torch's autocast and
GradScaler, and the levels. ``--device cuda`` takes NCCL and a GPU for each rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]

import pages  # noqa: E402  # after the path
import ranks  # noqa: E402
from benchmarks.rounds import Seconds, interleave, ratio  # noqa: E402

from amp_patch import amp  # noqa: E402

PAGE = pages.DOCS / "several-gpus.md"
TORCH = "autocast and GradScaler"
CANDIDATES = (TORCH, "O1", "O2", "O5")
WIDTH, LAYERS, ROWS = 256, 8, 16


class Counted(NamedTuple):
    """The collectives of one step, as one rank sees them.

    Attributes:
        kinds: of the collectives, and how many of each.
        sent: bytes of the larger of what each takes and returns.
        small: how many of them are of 64 bytes at most.
    """

    kinds: dict[str, int]
    sent: int
    small: int


class Row(NamedTuple):
    """What was measured of a candidate.

    Attributes:
        seconds: of a step, the median of each round.
    """

    counted: Counted
    seconds: list[Seconds]


#: What torch's operators are called that start a collective.
_KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
}


class Counting(TorchDispatchMode):
    """Notes the collectives that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the collectives, which come here then
        if function.namespace in ("c10d", "_c10d_functional"):
            name = _KINDS.get(function._opname)
            sizes = [one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor)]
            if name is not None:
                self._found.append((name, max(sizes)))
        return function(*args, **(kwargs or {}))

    def result(self) -> Counted:
        """Return what was counted."""
        sizes = [size for _, size in self._found]
        kinds = dict(Counter(name for name, _ in self._found))
        return Counted(kinds, sum(sizes), sum(size <= 64 for size in sizes))


def make_step(engine: str, candidate: str, device: torch.device) -> Callable[[], None]:
    """Return what makes a step of a new model, clipped by its norm."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if engine == "FSDP2":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if candidate != TORCH:
        amp.initialize(model, optimizer, opt_level=candidate, verbosity=0)
    if engine == "DDP":
        model = DistributedDataParallel(model)
    inputs = torch.randn(ROWS, WIDTH, device=device)
    take = _step_by_torch if candidate == TORCH else _step_by_amp
    return partial(take, model, optimizer, inputs, torch.amp.GradScaler(device.type))


def _step_by_amp(model: nn.Module, optimizer: Any, inputs: Tensor, _: Any) -> None:
    optimizer.zero_grad()
    loss = model(inputs).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    amp.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()


def _step_by_torch(model: nn.Module, optimizer: Any, inputs: Tensor, scaler: Any) -> None:
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, torch.float16):
        outputs = model(inputs)
    scaler.scale(outputs.float().square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def measure(engine: str, device_type: str, rounds: int, steps: int) -> dict[str, Row]:
    """Return what this rank measures of each candidate."""
    device = torch.device(device_type, distributed.get_rank() if device_type == "cuda" else None)
    counted: dict[str, Counted] = {}

    def timed(candidate: str) -> Seconds:
        step = make_step(engine, candidate, device)
        try:
            for _ in range(2):
                step()
            with Counting() as counting:
                step()
            counted[candidate] = counting.result()
            return statistics.median(_time_of(step, device) for _ in range(steps))
        finally:
            amp.deactivate()

    candidates = {name: partial(timed, name) for name in CANDIDATES}
    seconds = interleave(candidates, rounds, lambda: None)
    return {name: Row(counted[name], seconds[name]) for name in CANDIDATES}


def _time_of(step: Callable[[], None], device: torch.device) -> Seconds:
    distributed.barrier()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def table(found: dict[tuple[str, int], dict[str, Row]]) -> str:
    """Return the table of the docs."""
    lines = [
        "| engine | ranks | | collectives of a step | of these, 64 bytes at most | KiB |",
        "|---|---|---|---|---|---|",
    ]
    for (engine, size), rows in found.items():
        for name, (counted, _) in rows.items():
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counted.kinds.items()))
            cells = (engine, size, name, kinds, counted.small, counted.sent // 1024)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def times(found: dict[tuple[str, int], dict[str, Row]]) -> str:
    """Return a line for each candidate: its step's time, and its ratio to torch's by rounds."""
    lines = []
    for (engine, size), rows in found.items():
        seconds = {name: row.seconds for name, row in rows.items()}
        for name in rows:
            median = statistics.median(seconds[name]) * 1e3
            ratios = ratio(seconds, name, TORCH)
            spread = f"{ratios.median:.2f} ({ratios.lower:.2f} to {ratios.upper:.2f})"
            lines.append(f"{engine} {size} {name}: {median:.2f} ms, {spread} of torch's")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--engines", nargs="+", choices=("DDP", "FSDP2"), default=["DDP", "FSDP2"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write-docs", action="store_true", help="write the table there")
    args = parser.parse_args()
    backend = "nccl" if args.device == "cuda" else "gloo"
    found = {}
    for engine in args.engines:
        for size in args.ranks:
            options = {"size": size, "timeout": 600.0, "backend": backend}
            measured = ranks.run(measure, engine, args.device, args.rounds, args.steps, **options)
            found[engine, size] = measured[0]
    print(table(found))
    print(times(found))
    if args.write_docs:
        pages.write_between_markers(PAGE, "collectives", table(found))


if __name__ == "__main__":
    main()
