"""Which half gradients a step has used, and left where they are; knows no masters.

Plain PyTorch would add the next backward to them, or step them again.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

Reference = Tensor | weakref.ref[Tensor]


def is_of(reference: Reference, grad: Tensor | None) -> bool:
    """Return whether a gradient is that which was noted by a reference."""
    known = reference if isinstance(reference, Tensor) else reference()
    return known is not None and known is grad


def are_of(references: Sequence[Reference], grads: Sequence[Tensor]) -> bool:
    """Return whether `is_of` holds of all pairs of two lists of the same length."""
    known = [one() if type(one) is weakref.ref else one for one in references]
    return all(map(operator.is_, known, grads))


class UsedGradients:
    """The half gradients that a step has used, or will; weakly held where they are large.

    Attributes:
        has_older: whether an earlier step has used some of them, which no pass had reached since
            when they were noted.
    """

    def __init__(self) -> None:
        self._noted: list[Reference] = []  # of the last pass
        self._earlier: list[weakref.ref[Tensor]] = []  # of passes before it, for the same step
        self._versions: dict[int, int] = {}
        self.has_older = False

    def begin(self, grads: Iterable[Reference], *, are_older: bool = False) -> None:
        """Note those of the first pass for a step; those of the step before are forgotten.

        Args:
            grads: of the pass.
            are_older: whether they are what an earlier step has used, and no pass has reached.
        """
        self._noted = [*grads]
        self.has_older = are_older and bool(self._noted)
        self._earlier.clear()
        if self._versions:
            self._versions = {}

    def note_versions(self, grads: Iterable[Tensor] | None = None) -> None:
        """Tell, from now on, those that are written to: zeroed in place, and added to.

        Args:
            grads: of which; None: all.
        """
        noted = self.alive() if grads is None else grads
        self._versions = {id(grad): grad._version for grad in noted}

    def versions_of(self, grads: Iterable[Tensor]) -> dict[int, int]:
        """Return what `note_versions` has noted of these, by their ids."""
        known = self._versions
        return {id(grad): known[id(grad)] for grad in grads if id(grad) in known}

    def set_versions(self, versions: dict[int, int]) -> None:
        """Note what `versions_of` has returned, in the place of all others."""
        self._versions = versions

    def unwritten(self) -> list[Tensor]:
        """Return those that there still are, but for those written to since `note_versions`."""
        alive, known = self.alive(), self._versions
        return [one for one in alive if known.get(id(one), one._version) == one._version]

    def left(self) -> list[Tensor]:
        """Return those of `unwritten` that a backward may add to; none before `note_versions`."""
        return [one for one in self.unwritten() if id(one) in self._versions]

    @property
    def are_left(self) -> bool:
        """True where `left` may return some."""
        return bool(self._versions)

    def add(self, grads: Iterable[Reference]) -> None:
        """Note more for the same step; earlier ones are kept alive by others alone."""
        # most have died since: with many micro-batches the list would grow by a pass with each
        kept = [one for one in self._earlier if one() is not None]
        self._earlier, self._noted = kept + _weakly(self._noted), [*grads]

    def weaken(self) -> None:
        """Keep none alive."""
        self._noted = [*_weakly(self._noted)]

    def drop(self, grads: Iterable[Tensor | None]) -> None:
        """No step is to use these, for now."""
        dropped = set(map(id, grads))
        self._noted = [weakref.ref(one) for one in self.alive() if id(one) not in dropped]
        self._earlier.clear()

    def alive(self) -> list[Tensor]:
        """Return those that there still are."""
        every = chain(self._earlier, self._noted)
        noted = (one if isinstance(one, Tensor) else one() for one in every)
        alive: list[Any] = [grad for grad in noted if grad is not None]
        for grad in alive:
            grad._fix_weakref()  # as torch's TensorWeakRef does, which takes four times as long
        return alive

    def among(self, grads: Iterable[Tensor]) -> list[weakref.ref[Tensor]]:
        """Return references to those of these that were noted."""
        ids = set(map(id, self.alive()))
        return [weakref.ref(grad) for grad in grads if id(grad) in ids]


def _weakly(grads: Iterable[Reference]) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(one) if isinstance(one, Tensor) else one for one in grads]
