"""Masters of weights tied after `initialize`, as by ``out.weight.data = emb.weight.data``.

Both weights have the same memory then, and each its own gradient and its own master. Were the
masters apart, the last to be rounded would be there, and the other's update lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amp_patch.distributed.shards import set_data

#: A half parameter and its master.
Pair = tuple[Tensor, Tensor]


class Ties:
    """The masters of one optimizer that share memory because their half parameters do."""

    def __init__(self) -> None:
        self._tied: list[tuple[Pair, Pair]] = []

    def follow(self, pairs: Sequence[Pair], agrees: Callable[[int], bool]) -> None:
        """Let masters share memory where their half parameters do now, and nowhere else.

        Args:
            pairs: all half parameters, each with its master.
            agrees: whether the master of a row rounds to what its half parameter holds.
        """
        for (param, master), (other, _) in self._tied:
            if param.data_ptr() != other.data_ptr():
                set_data(master, master.detach().clone())
        self._tied.clear()
        first: dict[Any, int] = {}
        for row, (param, _) in enumerate(pairs):
            other_row = first.setdefault((param.data_ptr(), param.shape, param.stride()), row)
            if other_row != row:
                self._tie(pairs[row], pairs[other_row], agrees(other_row))

    def _tie(self, pair: Pair, other: Pair, other_agrees: bool) -> None:
        """Give two masters one memory: that of the half weight's own, which has further bits."""
        self._tied.append((pair, other))
        (_, kept), (_, left) = (other, pair) if other_agrees else (pair, other)
        if kept.data_ptr() != left.data_ptr():
            set_data(left, kept.detach())
