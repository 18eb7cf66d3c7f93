"""Masters that were given other memory: ``master.data = t`` is a write that no version tells of.

`torch.nn.utils.vector_to_parameters` writes so, and some optimizers do. Knows pairs and addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from .master_pairs import MasterPairs
from .unseen_master_writes import UnseenMasterWrites


class MovedMasters:
    """Where the masters of one optimizer are, so that those which have moved count as written to.

    Args:
        pairs: of the optimizer.
        unseen: knows the bits of masters by where they are.
        may_move: whether the optimizer may give masters other memory.

    Attributes:
        may_move: as above.
        was_set: whether a script has given one other memory since `count`.
    """

    def __init__(self, pairs: MasterPairs, unseen: UnseenMasterWrites, may_move: bool) -> None:
        self._pairs, self._unseen = pairs, unseen
        self.may_move = may_move
        self.was_set = False
        self._places: Sequence[tuple[int, Sequence[int]]] = ()

    def note_places(self) -> None:
        """The masters are where they belong."""
        self._places = self._pairs.places()

    def forget(self) -> None:
        """The masters may be elsewhere, but none was written to so."""
        self._places = ()

    def note_set(self, stepped: Tensor) -> None:
        """A script gives a tensor other memory, a master perhaps."""
        self.was_set |= id(stepped) in self._pairs.param_by_id

    def are_any(self) -> bool:
        """Return whether masters are elsewhere than they were, or it is not known where."""
        return self._pairs.places() != self._places

    def count(self) -> bool:
        """Count masters that have moved as written to.

        Returns:
            What `are_any` did before.
        """
        self.was_set = False
        places = self._pairs.places()
        if places == self._places:
            return False
        known = zip(self._pairs.masters, places, self._places, strict=False)  # some may be new
        for master, now, then in known:
            if now != then:
                increment_version(master)
                self._unseen.forget(now[0])
        self._places = places
        return True
