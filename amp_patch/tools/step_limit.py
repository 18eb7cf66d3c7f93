"""Ends a script that has made enough steps; runs in the script's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.optim import Optimizer

from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

from .optimizer_numbers import OptimizerNumbers
from .script_end import ScriptEnd

#: An optimizer rests that steps less often than another by more than this: a critic may take five
#: steps for one of the generator.
PATIENCE = 10


class StepCounts:
    """How many steps each optimizer has made, those that are gone included."""

    def __init__(self) -> None:
        self._numbers, self._counts = OptimizerNumbers(), Counter[int]()

    def add(self, optimizer: Optimizer) -> None:
        """Count one more."""
        self._counts[self._numbers.of(optimizer)] += 1

    @property
    def most(self) -> int:
        """The steps of the optimizer that has made most."""
        return max(self._counts.values(), default=0)

    def are_enough(self, limit: int) -> bool:
        """Return whether every optimizer of the session has so many, but for those that rest."""
        return self.most > limit + PATIENCE or all(
            self._counts[self._numbers.of(one)] >= limit for one in session.optimizers.steps
        )


class StepLimit(StepObserver):
    """Counts steps, skipped ones included, and ends the script after a number of them.

    Of several optimizers each gets that many, unless one of them is at rest.

    Args:
        limit: how many; 0 for no limit.
        at_end: called before the script is ended.
    """

    def __init__(self, limit: int, at_end: Callable[[], None]) -> None:
        self._limit, self._at_end = limit, at_end
        self._end = ScriptEnd()
        self._counts = StepCounts()

    @property
    def steps(self) -> int:
        """The steps of the optimizer that has made most."""
        return self._counts.most

    @property
    def has_ended(self) -> bool:
        """Whether the steps were enough, and the script was ended."""
        return self._end.was_called

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        self._counts.add(optimizer)
        if self._limit and self._counts.are_enough(self._limit):
            if not self._end.was_called:
                self._at_end()
            self._end()
