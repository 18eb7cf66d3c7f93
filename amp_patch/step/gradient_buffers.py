"""Where the gradients of one optimizer's parameters go, unscaled; knows no scale's rule.

A parameter that is stepped itself keeps its gradient; that of a half one goes to its fp32 master.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import kernels
from amp_patch.kernels import CudaCheck, GradCheck, small_tensors
from amp_patch.kernels.reusable import Reusable


class Held(NamedTuple):
    """What an optimizer holds, in its order: parameters, and what it steps for each."""

    params: list[Tensor]
    stepped: list[Tensor]

    def share(self, taken: set[int], by: Literal["params", "stepped"]) -> Held:
        """Return the rows whose parameter, or stepped tensor, is not in ``taken``, and add these.

        Args:
            taken: ids of tensors that another optimizer handles.
            by: which of the two is looked up.
        """
        keys = list(map(id, getattr(self, by)))
        new = [key not in taken for key in keys]
        taken.update(keys)
        return self if all(new) else self.select(new)

    def select(self, chosen: list[bool]) -> Held:
        """Return the rows that are chosen."""
        return Held(*(list(compress(column, chosen)) for column in self))


class Reception:
    """Where the gradients of an optimizer's parameters go, for as long as it holds the same ones.

    The tensors that the masters of small parameters receive theirs in are kept from one step to
    the next: to make one costs the host more than to fill it. Large ones would take memory that
    the next forward needs.

    Attributes:
        is_in_place: True where the parameters are stepped themselves: nothing goes anywhere.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._devices = _devices(held)
        self.is_in_place = same(*held)
        self._has_master = list(map(operator.is_not, *held))
        self._check: kernels.Check | None = None
        self._unscale = kernels.Unscale(*held)
        small = [
            master if param is not master and small_tensors.is_small(master) else None
            for param, master in zip(*held, strict=True)
        ]
        self._pools, self._kept = small_tensors.allocate(small)
        self._reusable = Reusable([buffer for buffer in self._kept if buffer is not None])
        self._all_kept = len(self._reusable.tensors) == len(self._kept)

    def fits(self, held: Held) -> bool:
        """Return whether this was made for the same tensors, and they are where they were."""
        is_known = held is self._held or all(map(same, held, self._held))
        return is_known and _devices(held) == self._devices

    def look(self, grads: list[Tensor], scale: float | Tensor) -> CudaCheck | None:
        """Check the gradients that masters are to receive where they are, if kernels can."""
        if self._check is None:
            self._check = kernels.Check(*self._held)
        in_place = [not has for has in self._has_master]
        return self._check.look(grads, self._held.stepped, in_place, scale)

    def rows_of_masters(self) -> list[int]:
        """Return which rows belong to masters."""
        return list(compress(range(len(self._has_master)), self._has_master))

    def of_masters(self, column: list[Tensor]) -> list[Tensor]:
        """Return the entries of a column that belong to masters."""
        return list(compress(column, self._has_master))

    def in_place(self, column: list[Tensor]) -> list[Tensor]:
        """Return the entries that belong to parameters stepped themselves."""
        return [entry for entry, has in zip(column, self._has_master, strict=True) if not has]

    def references(self, grads: list[Tensor]) -> Sequence[Tensor | TensorWeakRef]:
        """Return what tells these gradients from later ones, and keeps no large one alive."""
        if self._all_kept:
            return grads
        return [
            grad if small_tensors.is_small(master) else TensorWeakRef(grad)
            for grad, master in zip(grads, self._held.stepped, strict=True)
        ]

    def receive(self, grads: list[Tensor], scale: float | Tensor) -> GradCheck:
        """Unscale gradients in place where the optimizer steps the parameter, else into others."""
        if self.is_in_place:
            return self._unscale.run(grads, grads, scale)
        if not self._reusable.are_free() or any(map(_IS_SPARSE, grads)):
            return self._unscale.run(grads, self._targets(grads, repeat(None)), scale)
        if self._all_kept:
            return self._unscale.run(grads, self._reusable.tensors, scale, self._pools)
        targets = self._targets(grads, self._kept)
        new = [t for t, buffer in zip(targets, self._kept, strict=True) if t is not buffer]
        return self._unscale.run(grads, targets, scale, [*self._pools, *new])

    def _targets(self, grads: list[Tensor], kept: Iterable[Tensor | None]) -> list[Tensor]:
        return [
            buffer if buffer is not None else grad if param is master else _receiver(grad, master)
            for grad, param, master, buffer in zip(grads, *self._held, kept, strict=False)
        ]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def _devices(held: Held) -> list[int]:
    return list(map(Tensor.get_device, held.stepped))


def _receiver(grad: Tensor, master: Tensor) -> Tensor:
    """Return a new tensor for a gradient, which a bulk copy is still to fill if it is dense.

    A sparse gradient is not coalesced: the entries of one row are to be added in fp32.
    """
    if grad.is_sparse:
        return grad.to(device=master.device, dtype=master.dtype, copy=True)
    return torch.empty_like(grad, dtype=master.dtype, device=master.device)


_IS_SPARSE = operator.attrgetter("is_sparse")
