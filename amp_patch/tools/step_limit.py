"""Ends a script that has made enough steps; runs in the script's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.optim import Optimizer

from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip


class StepLimit(StepObserver):
    """Counts steps, skipped ones included, and ends the script after a number of them.

    Of several optimizers each gets that many, unless one of them is at rest.

    Args:
        limit: how many; 0 for no limit.
        at_end: called before the script is ended.
    """

    def __init__(self, limit: int, at_end: Callable[[], None]) -> None:
        self._limit, self._at_end = limit, at_end
        self._counts: Counter[int] = Counter()

    @property
    def steps(self) -> int:
        """The steps of the optimizer that has made most."""
        return max(self._counts.values(), default=0)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        self._counts[id(optimizer)] += 1
        if not self._limit or self.steps < self._limit:
            return
        all_there = min(self._counts[id(one)] for one in session.optimizers.steps) >= self._limit
        if all_there or self.steps > self._limit:
            self._at_end()
            raise SystemExit(0)
