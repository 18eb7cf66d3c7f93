"""What an optimizer's own ``zero_grad`` clears: all, as torch's, or the gradients of some groups.

Half parameters are to follow their masters, which have no gradients after a step: one of each part
of a group is given one, and what becomes of that tells of the part. Knows groups and pairs; no
losses and no scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_patch.distributed.shards import local
from amp_patch.kernels import values
from amp_patch.kernels.tensor_values import is_any
from amp_patch.weights.parameter_lists import store_grad, stored_grad

#: A matrix with more numbers gets no gradient only to see what becomes of it.
_MOST = 2**20

#: A parameter and its master, which may be one tensor.
Row = tuple[Tensor, Tensor]


class _Part:
    """Some parameters of a group with gradients, of whose masters one tells what becomes of all."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._master = _smallest(rows)
        self._was_given = stored_grad(self._master) is None
        if self._was_given:
            store_grad(self._master, torch.ones_like(self._master))
        grad = stored_grad(self._master)
        self._seen = grad, -1 if grad is None else grad._version

    def take_back(self) -> None:
        """Take the gradient from the master that was given one."""
        if self._was_given:
            self._master.grad = None

    def follow(self) -> bool:
        """Clear those of half parameters in the same way; return False where they were left."""
        grad, version = self._seen
        now = stored_grad(self._master)
        if now is not None and now is grad and now._version == version and _is_nonzero(now):
            self.take_back()
            return False
        halves = (row for row in self.rows if row[0] is not row[1])
        clear_halves(halves, set_to_none=now is None)
        return True


def _parts(rows: list[Row]) -> list[_Part]:
    """Return vectors and matrices of a group apart: some optimizers treat these otherwise."""
    matrices = [row for row in rows if row[1].dim() > 1]
    vectors = [row for row in rows if row[1].dim() < 2]
    if not (matrices and vectors) or _smallest(matrices).numel() > _MOST:
        return [_Part(rows)] if rows else []
    return [_Part(matrices), _Part(vectors)]


def _smallest(rows: list[Row]) -> Tensor:
    return min((master for _, master in rows), key=torch.numel)


def _is_nonzero(grad: Tensor) -> bool:
    """Return whether a gradient is not 0: ``grad.data.zero_()`` moves no version."""
    return bool(is_any(values(local(grad))))


class OwnZeroGrad:
    """One call of an optimizer's own ``zero_grad``, which is about to be made.

    Args:
        groups: the optimizer's.
        pairs: each half parameter with its master.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], pairs: Iterable[Row]) -> None:
        self._rest = {id(master): (param, master) for param, master in pairs}
        self._parts: list[_Part] = []
        for group in groups:
            rows = [self._rest.pop(id(param), (param, param)) for param in group["params"]]
            self._parts += _parts([row for row in rows if stored_grad(row[0]) is not None])

    def take_back(self) -> None:
        """The call has failed: masters have no gradients that they had not before."""
        for part in self._parts:
            part.take_back()

    def follow(self) -> set[int] | None:
        """Clear those of half parameters, as the call has cleared the masters'.

        Returns:
            None where it has cleared all; else the ids of the parameters whose gradients it has.
        """
        # pairs that no group has: a checkpoint may have put half parameters into the groups
        clear_halves(self._rest.values(), set_to_none=True)
        cleared = [part for part in self._parts if part.follow()]
        if len(cleared) == len(self._parts):
            return None
        return {id(param) for part in cleared for param, _ in part.rows}


def clear_halves(pairs: Iterable[Row], set_to_none: bool) -> None:
    """Clear those of half parameters, as ``optimizer.zero_grad`` has cleared the masters'.

    Where they are to be 0, the half parameter has the zeros, and its master no gradient: before the
    step it is given the zeros, or what a backward has added to them.

    Args:
        pairs: each half parameter with its master.
        set_to_none: False: they are 0 then, where there are some.
    """
    for param, master in pairs:
        if set_to_none or param.grad is None:
            param.grad = None
        else:
            param.grad, master.grad = torch.zeros_like(param.grad), None
