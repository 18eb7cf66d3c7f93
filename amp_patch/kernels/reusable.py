"""Tells whether anybody but its owner holds a tensor; knows nothing of what the tensor is for.

An owner makes a cast or a buffer once and writes to it again in each iteration. Nobody else may
see that: no variable of the user's, no view, no autograd graph that saved the tensor for its
backward. So references are counted before each write, and where there are others than the owner's
it makes a new tensor.
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
# Known to the types of torch 2.15 alone.
_count_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined, unused-ignore]


class Reusable:
    """Tensors that one owner writes to again and again; they may share storages.

    References are counted when this is made, and compared later.

    Args:
        tensors: held by nobody but the caller, who gives them and the list away: what is held now
            is never noticed.

    Attributes:
        tensors: the same list.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._storages = list({tensor.untyped_storage()._cdata for tensor in tensors})
        self._uses = list(map(_count_storage_uses, self._storages))
        self._references = list(map(sys.getrefcount, self.tensors))

    def are_free(self) -> bool:
        """Return whether nobody else holds any of them now: no graph, view, field or variable."""
        return (
            list(map(sys.getrefcount, self.tensors)) == self._references
            and list(map(_count_storage_uses, self._storages)) == self._uses
            and set(map(_count_uses, self.tensors)) <= {1}
            and _MANY_USES not in self._uses
        )


def is_held(tensor: Tensor, lists: int = 0) -> bool:
    """Return whether anybody holds a tensor apart from one field of its owner and this call.

    A graph that saved a weight's cast, for example, must see the old values in its backward. What
    it holds is an alias of the storage (linear layers) or the tensor itself (convolutions).

    Args:
        tensor: given as ``owner.field``, for the references of a call are counted.
        lists: how many lists of the owner's hold it, too.
    """
    return (
        _count_uses(tensor) > 1
        or not _count_storage_uses(tensor.untyped_storage()._cdata) <= _OWN_USES < _MANY_USES
        or (
            sys.getrefcount(tensor) > _OWN_REFERENCES + lists
            # Counted again, for a caller keeps its arguments while torch.compile evaluates frames:
            # from a compilation that raised to the end of the process, among others.
            and sys.getrefcount(tensor) > _count_own(_OWNER.field)[1] + lists
        )
    )


def _count_own(tensor: Tensor) -> tuple[int, int]:
    """Return what `is_held` counts for a tensor that one field holds, and nothing else."""
    return _count_storage_uses(tensor.untyped_storage()._cdata), sys.getrefcount(tensor)


# Counted here, for Python 3.10 counts an argument twice, and torch 2.6 a storage once less.
_OWNER = types.SimpleNamespace(field=torch.empty(1, device="cpu", dtype=torch.float32))
_OWN_USES, _OWN_REFERENCES = _count_own(_OWNER.field)
