"""Measures the kernels on a GPU against torch's own operations and a plain copy of the memory.

    python tests/benchmarks/kernels.py
    python tests/benchmarks/kernels.py --quick --device cpu

Every operation is timed in one process, on the parameters of three models and on one large tensor:
the bytes it has to move, its time, the share of a device-to-device copy's bandwidth and the number
of launches. The results are written where a GPU was measured as a whole.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.model_shapes import MODELS, Shape

from amp_patch import kernels

RESULTS = Path(__file__).with_name("results")
LARGE = "one tensor of 2**28 elements"
COPY = "copy of fp32"
COLUMNS = ("operation", "MB", "ms", "GB/s", "of the copy", "launches")
#: What must be reached on the large tensor, as a share of the copy's bandwidth.
AT_LEAST = {"unscale fp16 to fp32": 0.85}


@dataclass(frozen=True)
class Measured:
    """One operation on one list of tensors."""

    operation: str
    megabytes: float
    milliseconds: float
    share_of_copy: float
    launches: int

    def cells(self) -> tuple[str, ...]:
        bandwidth = self.megabytes / self.milliseconds
        return (
            self.operation,
            f"{self.megabytes:.1f}",
            f"{self.milliseconds:.3f}",
            f"{bandwidth:.0f}",
            f"{self.share_of_copy:.0%}",
            str(self.launches),
        )


@dataclass(frozen=True)
class Operation:
    """What is timed, and the bytes per parameter that it cannot do without."""

    name: str
    bytes_per_parameter: int
    run: Callable[[], object]


def operations(shapes: list[Shape], device: torch.device) -> list[Operation]:
    """Build the lists of tensors, and what is done to them: ours, and torch's for the same end."""
    masters = [torch.randn(shape, device=device) for shape in shapes]
    halves = [master.half() for master in masters]
    grads = [torch.full_like(half, 1e-4) for half in halves]
    received = [torch.zeros_like(master) for master in masters]
    scale, inverse = torch.ones(1, device=device), torch.ones(1, device=device)
    unscale = functools.partial(kernels.Unscale(grads, received).run, grads, received, scale)
    in_place = functools.partial(kernels.Unscale(received, received).run, received, received, scale)
    comparison = kernels.Comparison(masters, halves)
    return [
        Operation(COPY, 8, lambda: copy_each(received, masters)),
        Operation("unscale fp16 to fp32", 6, unscale),
        Operation("unscale fp32 in place", 8, in_place),
        Operation("torch's unscale fp32 in place", 8, lambda: torch_unscale(received, inverse)),
        Operation("accumulate fp32", 12, lambda: kernels.accumulate(received, masters)),
        Operation("torch's _foreach_add_", 12, lambda: torch._foreach_add_(received, masters)),
        Operation("cast fp32 to fp16", 6, kernels.Cast(masters, halves).run),
        Operation("torch's _foreach_copy_", 6, lambda: torch._foreach_copy_(halves, masters)),
        Operation("reconcile", 6, lambda: comparison.reconcile(lambda: [True] * len(masters))),
        Operation("clip by norm", 12, lambda: kernels.clip_by_norm(received, 1.0, 2.0)),
        Operation("torch's clip_grad_norm_", 12, torch_clip(masters, received)),
        Operation("torch's AdamW(fused=True)", 28, torch_adamw(masters, received)),
    ]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def torch_unscale(grads: list[Tensor], inverse: Tensor) -> None:
    found_inf = torch.zeros_like(inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)


def torch_clip(masters: list[Tensor], grads: list[Tensor]) -> Callable[[], Tensor]:
    params = parameters(masters, grads)
    return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)


def torch_adamw(masters: list[Tensor], grads: list[Tensor]) -> Callable[[], object]:
    return torch.optim.AdamW(parameters(masters, grads), lr=1e-9, fused=True).step


def parameters(masters: list[Tensor], grads: list[Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(master) for master in masters]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time, of the device where it is a GPU."""
    for _ in range(3):
        run()
    return statistics.median(one_time(run, device) for _ in range(repeats))


def one_time(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # the host gets ahead, so that what it does is not in the time
    torch.cuda._sleep(10_000_000)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def launches(run: Callable[[], object], device: torch.device) -> int:
    """Return the number of kernels that the GPU ran; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    moved = ("Memcpy", "Memset")
    return sum(
        event.device_type == kind and not event.name.startswith(moved) for event in profile.events()
    )


def measure(shapes: list[Shape], device: torch.device, repeats: int) -> list[Measured]:
    """Time every operation on tensors of these shapes."""
    count = sum(map(math.prod, shapes))
    copy_time = copy_milliseconds(count, device, repeats)
    rows = []
    for operation in operations(shapes, device):
        megabytes = operation.bytes_per_parameter * count / 1e6
        taken = milliseconds(operation.run, device, repeats)
        share = copy_time * operation.bytes_per_parameter / 8 / taken
        number = launches(operation.run, device)
        rows.append(Measured(operation.name, megabytes, taken, share, number))
    return rows


def copy_milliseconds(count: int, device: torch.device, repeats: int) -> float:
    """Time the copy that all are compared with: as many elements, in one tensor."""
    one, other = (torch.empty(count, device=device) for _ in range(2))
    return milliseconds(lambda: other.copy_(one), device, repeats)


def machine(device: torch.device) -> dict[str, str]:
    about = {
        "device": "CPU",
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device.type == "cuda":
        import cupy

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        about |= {"device": torch.cuda.get_device_name(device), "driver": driver}
        about |= {"CUDA": str(torch.version.cuda), "cupy": cupy.__version__}
    return about


def show(console: Console, name: str, rows: list[Measured]) -> None:
    table = Table(*COLUMNS, box=SIMPLE_HEAD, title=name)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)


def missed(rows: list[Measured]) -> list[str]:
    """Name what moves fewer bytes per second than it must."""
    shares = [(row, AT_LEAST.get(row.operation, 0.0)) for row in rows]
    return [
        f"{row.operation}: {row.share_of_copy:.0%} of the copy, must be {share:.0%}"
        for row, share in shares
        if row.share_of_copy < share
    ]


def save(about: dict[str, str], measured: dict[str, list[Measured]]) -> Path:
    path = RESULTS / f"{about['device'].replace(' ', '-')}.json"
    lists = {name: [asdict(row) for row in rows] for name, rows in measured.items()}
    text = json.dumps({"machine": about, "lists": lists}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--quick", action="store_true", help="tiny tensors, nothing is written")
    args = parser.parse_args()
    shapes = {name: make() for name, make in MODELS.items()} | {LARGE: [(2**28,)]}
    if args.quick:
        shapes = {name: [(2,) * len(one) for one in some[:20]] for name, some in shapes.items()}
    console = Console()
    measured = {}
    for name, some in shapes.items():
        measured[name] = measure(some, args.device, repeats=2 if args.quick else 30)
        show(console, f"{name}: {len(some)} tensors", measured[name])
    about = machine(args.device)
    console.print(", ".join(about.values()))
    if not args.quick:
        console.print(*missed(measured[LARGE]), f"written: {save(about, measured).name}", sep="\n")


if __name__ == "__main__":
    main()
