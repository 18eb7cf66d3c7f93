"""Tensors that are written over, iteration after iteration; knows who would see that, and no more.

Whoever holds such a tensor when it is to be written again keeps what it saw: the owner makes a
new one.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor

_MANY_USES = sys.maxsize
# CPU builds of torch before 2.8 cannot tell: there every tensor counts as held.
_count_storage_uses = getattr(torch._C, "_storage_Use_Count", lambda storage: _MANY_USES)
_count_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # no stub


class Reusable:
    """Tensors that only their owner holds, at the time when this is made; they may share storages.

    Args:
        tensors: a list that is handed over; `is_held` sees one that stays with the caller.

    Attributes:
        tensors: the same list.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._storages = list({tensor.untyped_storage()._cdata for tensor in tensors})
        self._uses = self._count_uses()
        self._references = self._count_references()

    def are_free(self) -> bool:
        """Return whether nobody has come to hold any of them: no graph, view, field or name."""
        return (
            self._count_references() == self._references
            and self._count_uses() == self._uses
            and set(map(_count_uses, self.tensors)) <= {1}
            and _MANY_USES not in self._uses
        )

    def _count_references(self) -> list[int]:
        return list(map(sys.getrefcount, self.tensors))

    def _count_uses(self) -> list[int]:
        return list(map(_count_storage_uses, self._storages))


def is_held(tensor: Tensor) -> bool:
    """Return whether a graph, a view or a caller holds a tensor, apart from one field of its owner.

    A graph that saved a weight's cast before a step must see the old values in its backward.
    Linear layers save an alias of the storage, convolutions the tensor itself.
    """
    return (
        _count_uses(tensor) > 1
        or not _count_storage_uses(tensor.untyped_storage()._cdata) <= _OWN_USES < _MANY_USES
        or sys.getrefcount(tensor) > _OWN_REFERENCES
    )


def _count_own(tensor: Tensor) -> tuple[int, int]:
    """Return what `is_held` counts for a tensor that one field holds, and nothing else."""
    return _count_storage_uses(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


# Counted here, for Python 3.10 counts an argument twice, and torch 2.6 a storage once less.
_OWNER = types.SimpleNamespace(field=torch.empty(1, device="cpu"))
_OWN_USES, _OWN_REFERENCES = _count_own(_OWNER.field)
