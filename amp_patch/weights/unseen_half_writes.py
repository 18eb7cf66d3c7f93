"""Writes to half weights that no version tells of, as those of ``weight.data.mul_(mask)``.

A comparison with the masters finds each, and reads all weights. So large ones are compared in the
first steps of a training, and then where something tells that a script may have written so. Knows
no numbers.
"""

from __future__ import annotations

from torch.nn import Parameter

from amp_patch.common.early_looks import EarlyLooks
from amp_patch.distributed.process_groups import is_on

from .fp32_values import FP32Values
from .master_pairs import MasterPairs


class UnseenHalfWrites:
    """Tells whether the half weights of one optimizer may have been written to without a version.

    Args:
        pairs: of the optimizer.
        values: told of each read of a weight's ``.data``.

    Attributes:
        looks: one in each step.
    """

    def __init__(self, pairs: MasterPairs, values: FP32Values) -> None:
        self._pairs, self._values = pairs, values
        self._reads, self._was_told = values.data_reads, False
        self.looks = EarlyLooks()

    def may_be_any(self) -> bool:
        """Return whether there may be such writes since this was asked last.

        Writes through a view that the script still holds are found by `kernels.large_copies`.
        """
        before, self._reads = self._reads, self._values.data_reads
        self._was_told = self._reads != before
        if self.looks.left or self._was_told or is_on():  # collectives move no version
            return True
        # Reads of ``.data`` are told of plain parameters alone, not of the shards of a DTensor.
        return set(map(type, self._pairs.params)) != {Parameter}

    def note_found(self) -> None:
        """Such a write was found; look in all later steps, too, unless something told of it."""
        if not self._was_told:
            self.looks.go_on()
