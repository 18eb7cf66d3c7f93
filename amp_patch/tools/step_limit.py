"""Ends a script that has made enough steps; runs in the script's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.optim import Optimizer

from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

from .script_end import ScriptEnd

#: An optimizer rests that steps less often than another by more than this: a critic may take five
#: steps for one of the generator.
PATIENCE = 10


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
        self._counts: Counter[int] = Counter()

    @property
    def steps(self) -> int:
        """The steps of the optimizer that has made most."""
        return max(self._counts.values(), default=0)

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        """See `StepObserver`."""
        self._counts[id(optimizer)] += 1
        if self._limit and is_enough(self._counts, self._limit):
            if not self._end.was_called:
                self._at_end()
            self._end()


def is_enough(counts: Counter[int], limit: int) -> bool:
    """Return whether every optimizer has its steps, but for those that rest.

    Args:
        counts: the steps of the session's optimizers, by their ids.
        limit: how many each is to have.
    """
    return max(counts.values(), default=0) > limit + PATIENCE or all(
        counts[id(one)] >= limit for one in session.optimizers.steps
    )
