"""Numbers for the optimizers of a script, by which recorders tell them apart; keeps none alive."""

from __future__ import annotations

import itertools
import weakref

from torch.optim import Optimizer


class OptimizerNumbers:
    """Numbers optimizers from 0, as they are first seen.

    No number is given twice, also where an optimizer is gone when the next one comes.
    """

    def __init__(self) -> None:
        self._next = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        return self._numbers[optimizer]
