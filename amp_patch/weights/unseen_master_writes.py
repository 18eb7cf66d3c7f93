"""Writes to masters that no version tells of, as those of ``master.data.copy_(slow)``.

Lookahead and weight decay by hand write so to the parameters of ``optimizer.param_groups``. Where a
master and its half parameter disagree, and no version has moved, the half parameter is taken to be
what was written. So such a write would be undone. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_patch.common.early_looks import EarlyLooks
from amp_patch.kernels.graph_capture import captures

from .half_bits import sum_of_bits
from .parameter_lists import as_plain_tensors


class UnseenMasterWrites:
    """Compares the bits of masters with what they were, in the first steps of a training.

    And after a read of their ``.data``. Where it finds a write it looks in all later steps, too. A
    look reads all masters of which something is noted.

    Args:
        sums: of the bits of each master, and its version then, by its address: two optimizers of
            one parameter step one memory.

    Attributes:
        looks: one in each step. Without any left nothing is noted.
    """

    def __init__(self, sums: dict[int, tuple[int, int]]) -> None:
        self._sums = sums
        self.looks = EarlyLooks()

    def note(self, local: Sequence[Tensor]) -> None:
        """Note what this rank holds of the masters: all that was written to them is known."""
        self._sums.update(self._sums_of(local))

    def note_moved(self, local: Sequence[Tensor]) -> None:
        """A script may write to masters next; versions tell of what came before, as of a load.

        Args:
            local: what this rank holds of each.
        """
        if not self.looks.left:
            return
        noted = self._sums
        self.note([one for one in local if noted.get(one.data_ptr(), _NOTHING)[1] != one._version])

    def forget(self, place: int) -> None:
        """Nothing is known of what is at an address: another master, say, has come there."""
        self._sums.pop(place, None)

    def look_now(self, local: Sequence[Tensor]) -> None:
        """Look until a step has been made: who has read ``master.data`` may write to it.

        Args:
            local: what this rank holds of the masters, to which nothing has been written yet.
        """
        self.looks.look_once()
        self.note(local)

    def unwritten(self, local: Sequence[Tensor]) -> list[bool]:
        """Return for each master whether it has the bits and the version that were noted of it.

        Args:
            local: what this rank holds of each.
        """
        found = self._sums_of(local)
        return [self._sums.get(key := one.data_ptr()) == found.get(key, ()) for one in local]

    def increment_versions(self, masters: Sequence[Tensor], local: Sequence[Tensor]) -> None:
        """Move the version of each master that is not what it was at that version.

        Args:
            masters: all of them.
            local: what this rank holds of each.
        """
        known = self._sums
        rows = [row for row, held in enumerate(local) if held.data_ptr() in known]
        found = self._sums_of([local[row] for row in rows])
        if not found:
            return
        for row in rows:
            master, place = masters[row], local[row].data_ptr()
            (total, version), (noted, at) = found[place], known[place]
            if total != noted and version == at:
                increment_version(master)
                self.looks.go_on()  # the script writes so
        known.update(found)

    def _sums_of(self, local: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
        if not local or not self.looks.left or not are_readable(local):
            return {}
        with torch.inference_mode(False), torch._C._DisableFuncTorch(), as_plain_tensors(local):
            sums = [sum_of_bits(one) for one in local]
            totals = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
        pairs = zip(local, totals, strict=True)
        return {one.data_ptr(): (total, one._version) for one, total in pairs}


#: The sum and the version of a master of which nothing is noted.
_NOTHING = 0, -1


def are_readable(masters: Iterable[Tensor]) -> bool:
    """Tell whether the host may read numbers now: not so while a graph is captured or traced."""
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    devices = {master.device for master in masters}
    return not any(one.type == "meta" or captures.are_made(one) for one in devices)
