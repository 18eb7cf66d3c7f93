"""What an optimizer's own ``zero_grad`` clears, of which half parameters are to follow.

It sees the masters, which have no gradients behind a step: one of each group is given one, and what
becomes of that tells of the group. Knows groups and pairs; no losses and no scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_patch.distributed.shards import local
from amp_patch.kernels import values
from amp_patch.weights.parameter_lists import store_grad, stored_grad


class _Group:
    """The masters of one group whose half parameters have gradients, one of them with its own."""

    def __init__(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows
        self._master = min((master for _, master in rows), key=torch.numel)
        self._was_given = stored_grad(self._master) is None
        if self._was_given:
            store_grad(self._master, torch.ones_like(self._master))
        grad = stored_grad(self._master)
        self._seen = grad, -1 if grad is None else grad._version

    def follow(self) -> bool:
        """Clear those of half parameters in the same way; return False where they were left."""
        grad, version = self._seen
        now = stored_grad(self._master)
        is_same = now is grad and now is not None and now._version == version
        if is_same and _has_numbers(now):
            if self._was_given:
                self._master.grad = None
            return False
        clear_halves(self.rows, set_to_none=now is None)
        return True


def _has_numbers(grad: Tensor | None) -> bool:
    """Return whether a gradient is not 0: ``grad.data.zero_()`` moves no version."""
    return grad is not None and bool(values(local(grad)).any())


class OwnZeroGrad:
    """One call of an optimizer's own ``zero_grad``, which is about to be made.

    Args:
        groups: the optimizer's.
        pairs: each half parameter with its master.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        self._rest = {id(master): (param, master) for param, master in pairs}
        self._groups = []
        for group in groups:
            rows = [self._rest.pop(id(p)) for p in group["params"] if id(p) in self._rest]
            rows = [row for row in rows if stored_grad(row[0]) is not None]
            if rows:
                self._groups.append(_Group(rows))

    def follow(self) -> set[int] | None:
        """Clear those of half parameters, as the call has cleared the masters'.

        Returns:
            None where it has cleared all; else the ids of the half parameters that it has.
        """
        # of no group: a checkpoint may have put half parameters into the groups
        clear_halves(self._rest.values(), set_to_none=True)
        cleared = [group for group in self._groups if group.follow()]
        if len(cleared) == len(self._groups):
            return None
        return {id(param) for group in cleared for param, _ in group.rows}


def clear_halves(pairs: Iterable[tuple[Tensor, Tensor]], set_to_none: bool) -> None:
    """Clear those of half parameters, as ``optimizer.zero_grad`` has cleared the masters'.

    A master gets zeros with the step, of its parameter, and what a backward adds to these.

    Args:
        pairs: each half parameter with its master.
        set_to_none: False: they are 0 then, where there are some.
    """
    for param, master in pairs:
        if set_to_none or param.grad is None:
            param.grad = None
        else:
            param.grad, master.grad = torch.zeros_like(param.grad), None
