"""Times calls that a GPU runs later than Python makes them; it knows nothing of what it times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: At least so long the device sleeps before a timed call: the host makes all launches meanwhile.
LEAST_CYCLES = 60_000_000  # about 30 ms
#: The clock of a GPU is at most about this.
CYCLES_PER_MILLISECOND = 2_000_000
#: In its first steps amp_patch looks for mistakes of the script.
_WARM_UP = 40


@dataclass(frozen=True)
class Times:
    """Medians, in milliseconds.

    Attributes:
        device: the device's time, without what the host does; on a CPU the call's.
        host: until the call returned, of a device that had nothing to do.
    """

    device: float
    host: float


def time_calls(run: Callable[[], object], device: torch.device, repeats: int) -> Times:
    """Time a call ``repeats`` times, after some that are not timed."""
    for _ in range(_WARM_UP if device.type == "cuda" else 1):
        run()
    host = statistics.median(_host_time(run, device) for _ in range(repeats))
    if device.type != "cuda":
        return Times(host, host)
    cycles = max(LEAST_CYCLES, int(2 * host * CYCLES_PER_MILLISECOND))
    return Times(statistics.median(_device_time(run, cycles) for _ in range(repeats)), host)


def _host_time(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _device_time(run: Callable[[], object], cycles: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def count_launches(run: Callable[[], object], device: torch.device) -> int:
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
