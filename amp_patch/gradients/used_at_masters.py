"""Gradients that a step has used and left, as a script finds them in ``optimizer.param_groups``.

Plain PyTorch adds the next backward to them, unless they were cleared. They are at the half
parameters; a script may clear them at the masters. What wraps an optimizer looks there for the
parameters that were stepped, as schedulefree's wrapper and torch's averager of models do. Knows no
optimizer and no backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.common.early_looks import EarlyLooks
from amp_patch.distributed.shards import local
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.tensor_values import same_numbers
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.parameter_lists import store_grad, stored_grad

from .param_pairs import ParamPairs
from .used_gradients import UsedGradients


class UsedAtMasters:
    """Shows masters what a step has used, and follows what a script makes of it.

    Args:
        used: notes which half gradients these are.
        own: tells which gradients of masters no script has written.

    Attributes:
        copied: each half parameter with its master, and the version of its gradient, by the id of
            the master, from `copy_to_masters` until `follow` or `forget`.
    """

    def __init__(self, used: UsedGradients, own: OwnGradients) -> None:
        self._used, self._own = used, own
        self._waits, self._looks = False, EarlyLooks()
        self.copied: dict[int, tuple[Tensor, Tensor, int]] = {}

    @property
    def are_left(self) -> bool:
        """True where there may be some, and the next backward outside of a block adds to them."""
        return self._used.are_left

    @property
    def wait_to_be_read(self) -> bool:
        """True after a step of what blocks left, until they are shown or the next block begins."""
        return self._waits and not (self.are_left or self.copied)

    def note_step(self, is_shown: bool) -> None:
        """Note that a step has ended.

        Args:
            is_shown: whether the half gradients are what it has used.
        """
        self._waits = is_shown

    def copy_to_masters(self, pairs: ParamPairs) -> None:
        """Let masters have copies of those that are still as the step left them."""
        used = set(map(id, self._used.left() if self.are_left else self._used.alive()))
        copied: dict[int, tuple[Tensor, Tensor, int]] = {}
        for param, master in zip(*pairs, strict=True):
            grad = stored_grad(param)
            if grad is not None and id(grad) in used and stored_grad(master) is None:
                store_grad(master, grad.detach().to(master.dtype, copy=True))
                self._own.note(master)
                copied[id(master)] = param, master, grad._version
        self.copied = copied

    def look_at(self, master: Tensor) -> None:
        """Clear what a master was shown where the half one is gone: a script is about to ask."""
        if id(master) in self.copied and stored_grad(self.copied[id(master)][0]) is None:
            del self.copied[id(master)]
            store_grad(master, None)

    def follow(self, *, steps: bool = False) -> None:
        """Clear those that a script has cleared, and what masters were shown of the others.

        Args:
            steps: whether what a script wrote stays at masters, for a step; else it goes to the
                half parameters, rounded, for a backward that adds to it.
        """
        self._waits = False
        if not self.copied:
            return
        written, used = self._written(), set(map(id, self._used.alive()))
        for param, master, _ in self.copied.values():
            grad, half = stored_grad(master), stored_grad(param)
            if grad is None:
                if id(half) in used:  # and not what a script has put there since
                    store_grad(param, None)
            elif id(master) not in written or (half is None and self._was_there(master)):
                store_grad(master, None)
            elif not steps:
                give_rounded(param, master)
        self.forget()

    def _was_there(self, master: Tensor) -> bool:
        """Return whether a master had its gradient when the half one was cleared.

        Where `look_at` tells, it has; else one that a script has set is taken for a later one.
        """
        return self.are_left or self._own.has_stored(master)

    def _written(self) -> set[int]:
        """Return the ids of masters to whose gradients a script has written; waits for a device."""
        written: set[int] = set()
        unmoved: list[tuple[Tensor, Tensor]] = []
        left = set(map(id, self._used.left()))
        if self._looks.left:  # before a block this matters in the first ones alone, which are told
            self._looks.count()
            left |= set(map(id, self._used.alive()))
        for param, master, version in self.copied.values():
            used = stored_grad(param)
            if stored_grad(master) is None:
                continue
            if not self._own.has(master):
                written.add(id(master))
            elif used is not None and id(used) in left and used._version == version:
                # ``grad.data`` moves no version
                unmoved.append((param, master))
        return written | have_other_numbers(unmoved)

    def forget(self) -> None:
        """Nothing is shown any more."""
        self.copied = {}
        self._own.forget()


def have_other_numbers(rows: Sequence[tuple[Tensor, Tensor]]) -> set[int]:
    """Return the ids of masters whose gradients are not what the half ones are; waits for a device.

    Args:
        rows: half parameters with their masters, which all have a gradient.
    """
    if not rows or captures.are_made(rows[0][1].device):  # nobody may wait in a capture
        return set()
    same = [_are_same_numbers(*(stored_grad(one) for one in row)) for row in rows]
    device = same[0].device
    found = torch.stack([one.to(device) for one in same]).tolist()
    return {id(master) for (_, master), is_same in zip(rows, found, strict=True) if not is_same}


def _are_same_numbers(half: Any, grad: Any) -> Tensor:
    """Return whether a gradient holds the numbers of one in half, on its device."""
    known, now = (kernels.values(local(one)) for one in (half, grad))
    return same_numbers(now, known)


def give_rounded(param: Tensor, master: Tensor) -> None:
    """Give a half parameter the gradient of its master, which is without one then."""
    grad = stored_grad(master)
    store_grad(param, None if grad is None else grad.detach().to(param.dtype))
    store_grad(master, None)
