"""Measures whether half precision is fast here: dtypes in turns, medians, nothing from one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HALVES = ("float16", "bfloat16")
#: In a round each dtype is measured once; so many rounds are made, time permitting.
_MOST_ROUNDS = 50
_FEWEST_ROUNDS = 5
#: Seconds that one call of an operation in float32 should take.
_LONG_ENOUGH = {"cuda": 2e-3, "cpu": 4e-3}

#: What is run in a dtype; returns when it is done.
Run = Callable[[], object]
#: Makes an operation of a size in a dtype.
Make = Callable[[int, torch.dtype], Run]


@dataclass(frozen=True)
class Speed:
    """An operation in a half dtype against float32.

    Attributes:
        operation: with its size, ``"matmul 512 x 512"``.
        dtype: ``"float16"``.
        float32_ms, half_ms: medians.
        ratio: how many times as fast the half dtype is: the median over the rounds.
        spread: the quartiles of that.
        rounds: how many there were.
    """

    operation: str
    dtype: str
    float32_ms: float
    half_ms: float
    ratio: float
    spread: tuple[float, float]
    rounds: int

    @property
    def is_fast(self) -> bool:
        """Whether it is certainly faster, by a fifth and more."""
        return self.spread[0] > 1.0 and self.ratio >= 1.2


def measure(device: torch.device, seconds: float) -> list[Speed]:
    """Measure matrix products and an elementwise function on a device.

    Args:
        device: the CPU or a GPU.
        seconds: about how long that may take in all.
    """
    operations: dict[str, tuple[str, Make, int, int]] = {
        "matmul": ("matmul {0} x {0}", lambda n, dtype: _matmul(device, n, dtype), 256, 8192),
        "elementwise": (
            "gelu of {0}",
            lambda n, dtype: _elementwise(device, n, dtype),
            2**18,
            2**28,
        ),
    }
    found = []
    for name, make, smallest, largest in operations.values():
        share = seconds / len(operations)
        size = choose_size(
            lambda size, make=make: _seconds(make(size, torch.float32)),  # type: ignore[misc]
            _LONG_ENOUGH[device.type],
            share,
            smallest,
            largest,
        )
        runs = {dtype: make(size, getattr(torch, dtype)) for dtype in ("float32", *HALVES)}
        found += compare(name.format(size), runs, share)
    return found


def choose_size(
    took: Callable[[int], float], long_enough: float, seconds: float, smallest: int, largest: int
) -> int:
    """Return the first size, doubled from the smallest, that takes long enough to be measured.

    Args:
        took: the seconds that a size takes.
        long_enough: seconds.
        seconds: for all; a call that takes a hundredth of it is long enough, too.
        smallest, largest: limits of the size.
    """
    size = smallest
    while size < largest and took(size) < min(long_enough, seconds / 100):
        size *= 2
    return size


def compare(
    operation: str,
    runs: Mapping[str, Run],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Speed]:
    """Run float32 and the others in turns, for so many seconds, and compare them.

    Args:
        operation: its name in the result.
        runs: by dtype; "float32" is the one to compare with.
        seconds: at least five rounds are made, however long they take.
        clock: returns seconds.
    """
    for run in runs.values():
        run()  # the first one chooses algorithms and allocates
    rounds: list[dict[str, float]] = []
    begin = clock()
    while len(rounds) < _MOST_ROUNDS:
        rounds.append({dtype: _timed(run, clock) for dtype, run in runs.items()})
        if len(rounds) >= _FEWEST_ROUNDS and clock() - begin > seconds:
            break
    return [_speed(operation, dtype, rounds) for dtype in runs if dtype != "float32"]


def _speed(operation: str, dtype: str, rounds: Sequence[Mapping[str, float]]) -> Speed:
    ratios = [one["float32"] / one[dtype] for one in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speed(
        operation,
        dtype,
        statistics.median(one["float32"] for one in rounds) * 1e3,
        statistics.median(one[dtype] for one in rounds) * 1e3,
        middle,
        (low, high),
        len(rounds),
    )


def _timed(run: Run, clock: Callable[[], float]) -> float:
    begin = clock()
    run()
    return max(clock() - begin, 1e-9)


def _seconds(run: Run) -> float:
    """Return what a call takes where nothing disturbs it."""
    run()
    return min(_timed(run, time.perf_counter) for _ in range(3))


def _matmul(device: torch.device, size: int, dtype: torch.dtype) -> Run:
    left, right = (
        torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    return _finished(lambda: left @ right, device)


def _elementwise(device: torch.device, size: int, dtype: torch.dtype) -> Run:
    values = torch.randn(size, device=device, dtype=torch.float32).to(dtype)
    return _finished(lambda: torch.nn.functional.gelu(values), device)


def _finished(run: Callable[[], Tensor], device: torch.device) -> Run:
    """Return what runs and waits until a GPU is done."""
    if device.type != "cuda":
        return run

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize(device)

    return run_and_wait
