"""Large copies of tensors: which of them need no comparison, for nobody has written to them.

A comparison reads both from memory, and takes as long as an optimizer's step. Versions tell of
most writes; of those by ``tensor.data``, or through memory that somebody keeps, they do not. Knows
tensors and who holds their memory; compares nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Pair = tuple[Tensor, Tensor]


class LargeCopies:
    """Pairs of a source and its copy, of which none has its values kept.

    Args:
        pairs: made for this alone: each copy is a ``detach()`` of a tensor that others have.
    """

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self.pairs = list(pairs)
        # Held, so that each look at a memory counts the same holders.
        self._storages = [copy.untyped_storage() for _, copy in pairs if _is_own(copy)]
        self._can_tell = _CAN_COUNT and len(self._storages) == len(pairs)
        # Whether others held a memory at the last look: they may have written to it since.
        self._were_held = [True] * len(pairs)
        # Of each source and copy when they were equal; None where that is not known.
        self._versions: list[tuple[int, int]] | None = None

    def note_equal(self) -> None:
        """Note that the copies were made from their sources just now."""
        self._versions = self._versions_now()

    def forget(self) -> None:
        """Note that sources may have been written to."""
        self._versions = None

    def unequal_perhaps(self, trusts: bool) -> list[tuple[_Pair, bool]]:
        """Return the pairs to be compared, and whether a version tells of a write to each.

        Those come last of which one does.

        Args:
            trusts: pass by pairs of which no version tells, and of whose memory only its tensor and
                this object have hold, now and at the last look.
        """
        held, were_held = self._are_held(), self._were_held
        self._were_held = held
        if self._versions is None:
            return [(pair, True) for pair in self.pairs]
        now = self._versions_now()
        written = [one != other for one, other in zip(self._versions, now, strict=True)]
        perhaps = [one or other for one, other in zip(held, were_held, strict=True)]
        unseen = [
            (pair, False)
            for pair, is_written, may_be in zip(self.pairs, written, perhaps, strict=True)
            if not is_written and (may_be or not trusts)
        ]
        return unseen + [(pair, True) for pair, one in zip(self.pairs, written, strict=True) if one]

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(source._version, copy._version) for source, copy in self.pairs]

    def _are_held(self) -> list[bool]:
        if not self._can_tell:
            return [True] * len(self.pairs)
        return [count > _OWN_HOLDERS for count in _holders(self._storages)]


def _is_own(copy: Tensor) -> bool:
    """Tell whether torch made a copy's memory, for this process alone: else others are unknown."""
    if type(copy) is not Tensor or not copy.is_cpu or copy.is_shared():
        return False
    return copy.untyped_storage().resizable()  # not so NumPy's memory, or a file's


def _holders(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Return how many hold each memory: tensors, and objects of Python, of which there is one."""
    count: Any = torch._C._storage_Use_Count
    return [count(one._cdata) + sys.getrefcount(one) for one in storages]


def _own_holders() -> int:
    """Return what is counted of a memory that a tensor holds, and a pair of `LargeCopies`."""
    tensor = torch.empty(1, device="cpu", dtype=torch.float32)
    copy = tensor.detach()
    return _holders([copy.untyped_storage()])[0]


_CAN_COUNT = hasattr(torch._C, "_storage_Use_Count")
_OWN_HOLDERS = _own_holders() if _CAN_COUNT else 0
