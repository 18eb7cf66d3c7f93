"""How many steps at the start of the runs are warm-up, whose time does not count."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .steps import Step

#: A step that takes so many times the usual time is still warming up.
SLOW = 1.5


def warm_up_steps(runs: Iterable[Sequence[Step]]) -> int:
    """Return how many steps to leave out at the start of every run.

    ::

        usual = median of the times in the second half of a run
        its warm-up = the leading steps above 1.5 x usual, at least 1, at most half of the steps
        returned: the longest of all runs

    A level that is slow at first would else look faster or slower than one that is not.
    """
    return max((_of_one(steps) for steps in runs if steps), default=0)


def _of_one(steps: Sequence[Step]) -> int:
    half = len(steps) // 2
    later = [step.seconds for step in steps[half:] if not step.counted]
    if not later:
        return 1
    limit = SLOW * statistics.median(later)
    leading = 0
    for step in steps[:half]:
        if step.seconds <= limit and not step.counted:
            break
        leading += 1
    return max(1, leading)


def timed(steps: Sequence[Step], warm_up: int) -> list[float]:
    """Return the seconds of the steps that count."""
    return [step.seconds for step in steps[warm_up:] if not step.counted]
