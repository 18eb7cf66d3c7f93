"""Times candidates in turn, round by round, and compares their medians.

It knows nothing of what it times. Each round times every candidate once, in an order that is
rotated from one round to the next, so that a slow spell of the machine falls on all of them and
cancels in the ratio of one round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass

Seconds = float
Candidate = Callable[[], Seconds]
"""Runs once from a fresh state, warm-up included, and returns the seconds to be compared."""


@dataclass(frozen=True)
class Spread:
    """The median of one number per round, with its quartiles and extremes."""

    median: float
    lower: float
    upper: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        ordered = sorted(values)
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if values[1:] else values
        return cls(statistics.median(ordered), quartiles[0], quartiles[-1], ordered[0], ordered[-1])

    def scaled(self, unit: float) -> Spread:
        """Return the same spread in multiples of ``unit``."""
        return Spread(*(value / unit for value in astuple(self)))


def interleave(
    candidates: Mapping[str, Candidate], rounds: int, on_round: Callable[[], object]
) -> dict[str, list[Seconds]]:
    """Time every candidate in every round; the values of one round stand at one index."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(candidates[name]())
        on_round()
    return seconds


def ratio(seconds: Mapping[str, list[Seconds]], name: str, baseline: str) -> Spread:
    """Return the spread of the rounds' ratios of two candidates."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return Spread.of([ours / theirs for ours, theirs in pairs])


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_once(function: Callable[[], object]) -> Seconds:
    with no_collection():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


def median_time(
    step: Callable[[], object],
    warm_up: int,
    steps: int,
    clock: Callable[[], Seconds] | None = None,
) -> Seconds:
    """Return the median seconds of a step, after ``warm_up`` steps that are not timed.

    Args:
        clock: ``time.perf_counter``; ``time.thread_time`` where other processes want the
            processor, too, and all that a step does happens in this thread.
    """
    clock = clock or time.perf_counter
    for _ in range(warm_up):
        step()
    with no_collection():
        marks = [clock()]
        for _ in range(steps):
            step()
            marks.append(clock())
    return statistics.median(end - start for start, end in zip(marks, marks[1:], strict=False))
