"""When values and their rounded copies were equal, and when the user was given which: by versions.

Knows tensors by their numbers in lists; no optimizer, and not what follows from a write.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from amp_patch.distributed.shards import version_of


class _Clock:
    """Counts how often any `Versions` was told of values that the user was given, or has back."""

    def __init__(self) -> None:
        self.time = 0

    def tick(self) -> int:
        self.time += 1
        return self.time


_clock = _Clock()


class Versions:
    """Versions of values and parameters, which tell later what was written to.

    An optimizer has one object for all of its masters, so that a step notes all in one assignment.

    Attributes:
        equal: of each value, when it and its parameter were equal.
        given: of each parameter, when the user was given the values, and may have written to them
            by ``.data``, which moves no version. Empty where the user was given none.
        given_values: of each value then; None of a pair that was equal since.
        given_at: when the user was given the values last, or had them no more, by a clock that all
            objects of the process share.
    """

    def __init__(self, equal: list[int] | None = None) -> None:
        self.equal = equal or []
        self.given: list[int] = []
        self.given_values: list[int | None] = []
        self.given_at = 0

    def give(self, params: list[int], values: Sequence[int]) -> None:
        """The user is given all values."""
        self.given, self.given_values = params, list(values)
        self._note_when()

    def give_again(self, rows: Sequence[int], params: Sequence[int], values: Sequence[int]) -> None:
        """Parameters equal now what the user was given of them.

        Args:
            rows: of these.
            params: the versions of all parameters.
            values: those of all values.
        """
        for row in rows:
            self.given[row], self.given_values[row] = params[row], values[row]
        self._note_when()

    def give_new(self, params: Sequence[int], values: Sequence[int]) -> None:
        """Pairs have come after those of which the user was given the values: these as well.

        Args:
            params, values: see `give_again`.
        """
        count = len(self.given)
        self.given += params[count:]
        self.given_values += values[count:]
        self._note_when()

    def drop_after(self, count: int) -> None:
        """Forget all rows but the first ``count``."""
        for column in (self.equal, self.given, self.given_values):
            del column[count:]

    def end_giving(self) -> None:
        """The user writes to none of them any more, and parameters equal them."""
        self.given, self.given_values = [], []
        self._note_when()

    def clear(self) -> None:
        """Forget all rows."""
        self.equal, self.given, self.given_values = [], [], []

    def _note_when(self) -> None:
        self.given_at = _clock.tick()

    def all_win(self, params: Sequence[int]) -> bool:
        """Return True where all parameters surely have to follow their values; as most often.

        The user was given all, and wrote to no parameter since, and nothing was given or ended by
        another optimizer, which may step some of them as well.
        """
        return self.given_at == _clock.time and self.given_yet() == params

    def given_yet(self) -> list[int | None]:
        """Return `given`, with None for each pair that was equal since."""
        rows = zip(self.given, self.given_values, strict=True)
        return [param if value is not None else None for param, value in rows]


class NotedValue:
    """One fp32 value, and what tells whether it was written to since the parameter equalled it.

    Attributes:
        value: fp32; the master itself where an optimizer steps one.
        noted: where its versions are noted, and its index there. Where two optimizers step the
            parameter both have noted them: it was written to only if its version is neither's.
        others: masters of the same memory that came before.
    """

    __slots__ = ("noted", "others", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.noted: list[tuple[Versions, int]] = []
        self.others: list[weakref.ref[Tensor]] = []

    def note_equal(self) -> None:
        """The parameter equals the value now."""
        for versions, index in self.noted:
            versions.equal[index] = version_of(self.value)
            if index < len(versions.given):
                versions.given_values[index] = None

    def wins(self, param_now: int) -> bool:
        """Return whether the parameter has to follow the value, see `FP32Values`.

        Args:
            param_now: see `FP32Values.version_of`.
        """
        version = version_of(self.value)
        last, index = max(self.noted, key=lambda noted: noted[0].given_at)
        if index < len(last.given):  # else it has come since
            value_then = last.given_values[index]
            if value_then is not None:
                return param_now == last.given[index] or version != value_then
        return all(versions.equal[index] != version for versions, index in self.noted)
