"""Half tensors that were found to be their fp32 values, rounded: all that are asked for at once.

What asks for one value after the other, as a state dict in the making, need not compare it again.
Knows pairs of tensors, their bits and versions; not who keeps the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from torch import Tensor

from .half_bits import can_be_compared, compared


class AlikeValues:
    """The values of half tensors, until either is written to.

    A script that reads or sets the ``.data`` of one may write to it without a version: whoever sees
    that calls `doubt`.
    """

    def __init__(self) -> None:
        # By the id of the half tensor: the value, and the versions of both when they were compared.
        self._known: dict[int, tuple[Tensor, int, int]] = {}

    def compare(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Look at pairs, each of a value and its half tensor; earlier ones are forgotten."""
        these = [pair for pair in pairs if can_be_compared(*pair)]
        # Before they are compared: what is written while they are is of another version.
        known = [(id(one), (value, one._version, value._version)) for value, one in these]
        self._known = dict(compress(known, compared(these)))

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the value that a half tensor is, rounded; None where that is not known."""
        known = self._known.get(id(tensor))
        if known is None or known[1:] != (tensor._version, known[0]._version):
            return None
        return known[0]

    def doubt(self, tensor: Tensor) -> None:
        """One may be written to without a version."""
        self._known.pop(id(tensor), None)

    def clear(self) -> None:
        """Forget all."""
        self._known = {}
