"""Rounds the masters of one optimizer into its half parameters, and compares the two.

What the kernels for that know of the tensors holds until any is given other memory. Knows pairs;
not which of the two follows the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels import torch_kernels

from .fp32_values import FP32Values
from .master_pairs import MasterPairs
from .moved_masters import MovedMasters
from .parameter_lists import as_plain_tensors, keeping_versions


class Rounding:
    """What is known of the masters and half parameters where they are.

    Args:
        pairs: of one optimizer.
        values: of the half parameters.
        moved: tells which masters were given other memory.

    Attributes:
        comparison: of all pairs, as of the last `renew`; None where nothing is known.
    """

    def __init__(self, pairs: MasterPairs, values: FP32Values, moved: MovedMasters) -> None:
        self._pairs, self._values, self._moved = pairs, values, moved
        self._forget_kernels()

    def _forget_kernels(self) -> None:
        self.comparison: torch_kernels.Comparison | None = None
        self._known: tuple[int, int, Sequence[int]] = (0, 0, ())
        self._cast = kernels.caster([], [])
        self._others: tuple[list[int], torch_kernels.Comparison] | None = None

    def forget(self) -> None:
        """Masters, or parameters, may be elsewhere; that is no write."""
        self._forget_kernels()
        self._moved.forget()

    def count_moved(self) -> None:
        """See `MovedMasters.count`."""
        if self._moved.count():
            self._forget_kernels()

    def renew(self, places: Sequence[int] | None = None) -> torch_kernels.Comparison:
        """Return the comparison of masters and parameters, made anew where any was replaced.

        ``model.to(device)``, ``p.data = t`` and new parameter groups do that; so does a load,
        after which what the parameters held before tells nothing.

        Args:
            places: where the parameters are; None: they are asked.
        """
        if self._moved.was_set:
            self.count_moved()
        params = self._pairs.local_params()
        if places is None:
            places = list(map(Tensor.data_ptr, params))
        known = self._values.loads, self._values.moves, places
        if self.comparison is None or known != self._known:
            self._pairs.follow_memory()
            self._known = known
            masters = self._pairs.local_masters()
            self._moved.note_places()
            self._cast = kernels.caster(masters, params)
            self.comparison = kernels.comparison(masters, params)
            self._others = None
        return self.comparison

    def write(self, left_out: Sequence[Tensor] = ()) -> None:
        """Round the masters into the half parameters.

        Args:
            left_out: of the parameters, those whose masters have not changed. They count as not
                written to: a graph may have saved them for a backward that is still to come.
        """
        if left_out:
            with keeping_versions(left_out):
                self.write()
        elif self._pairs.lazy is None:  # masters of torch's own class, at which it asks nothing
            self._cast.run()
        else:
            with as_plain_tensors(chain(self._pairs.params, self._pairs.masters)):
                self._cast.run()

    def write_rows(self, rows: Sequence[int]) -> None:
        """Round the masters of these rows into their parameters, where the two disagree."""
        comparison = self.renew()
        if len(rows) < len(self._pairs):
            comparison = self._compared(rows)
        comparison.reconcile(lambda: [True] * len(rows))

    def reconcile_these(self, wins: dict[int, bool]) -> None:
        """Reconcile some masters, given by their ids, with whether they win."""
        key = list(wins)
        if self._others is None or self._others[0] != key:
            rows = [row for row, one in enumerate(self._pairs.masters) if id(one) in wins]
            self._others = key, self._compared(rows)
        self._others[1].reconcile(lambda: list(wins.values()))

    def _compared(self, rows: Sequence[int]) -> torch_kernels.Comparison:
        masters, params = self._pairs.local_masters(), self._pairs.local_params()
        return kernels.comparison([masters[row] for row in rows], [params[row] for row in rows])
