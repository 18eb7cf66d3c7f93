"""Sums over ranks that a script has begun (``async_op=True``), and nobody has waited for yet.

Where gradients are averaged by hand, a hook of the backward begins the sum of each, and the script
waits before the step. The end of a ``scale_loss`` block comes between the two: it unscales what the
ranks are about to write to. Knows tensors; no optimizer and no scale.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.warn_once import warn_once

from .shards import place


class PendingSums:
    """All of this process.

    Those whose handle nobody holds are left out: torch's own hooks of communication wait by a
    future.

    Attributes:
        begun: by the handle, held weakly: what it writes to, and whether a backward was running
            when it was begun.
    """

    def __init__(self) -> None:
        self.begun: dict[weakref.ref[Any], tuple[Sequence[Tensor], bool]] = {}

    def note(self, work: Any, sent: Sequence[Tensor]) -> None:
        """A sum of these tensors was begun; ``work`` is the ``torch.distributed.Work`` of it."""
        self.begun[weakref.ref(work, self._forget)] = sent, is_in_backward()

    def end(self, work: Any) -> None:
        """Somebody has waited for it, or any other collective."""
        self._forget(weakref.ref(work))

    def _forget(self, handle: weakref.ref[Any]) -> None:
        self.begun.pop(handle, None)

    def settle(self, grads: Iterable[Tensor]) -> None:
        """A block is about to unscale these gradients, of any dtype: wait for what is in them.

        Of a sum that is in a tensor of the script's own, which it will copy back, a warning tells.
        """
        listed = [grad for grad in grads if grad.layout is torch.strided and grad.numel()]
        places, late = set(map(place, listed)), False
        for handle, (sent, was_in_backward) in list(self.begun.items()):
            work = handle()
            if work is None:
                continue
            if any(place(one) in places for one in sent if one.layout is torch.strided):
                work.wait()
            else:
                is_copy = was_in_backward and _may_be_copies(sent, listed)
                late |= is_copy or are_gradients(sent, listed)
                self.end(work)  # it is told of once
        if late:
            warn_once(
                "gradients that a script averages over ranks in tensors of its own must be copied "
                "back before a scale_loss() block ends, which unscales what is there; got a sum "
                "that was begun in the block (async_op=True), and that nobody has waited for: what "
                "it brings is multiplied by the loss scale, or comes too late for the step. Wait "
                "for it, and copy it back, inside of the block, after scaled_loss.backward()."
            )


def _may_be_copies(sent: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether these are as long as a gradient, or longer, as buckets of some are.

    A statistic of a batch is one number.
    """
    counts = set(map(Tensor.numel, grads)) - {1}
    return any(one.numel() in counts or one.numel() > max(counts, default=1) for one in sent)


def are_gradients(sent: Sequence[Tensor], grads: Iterable[Tensor]) -> bool:
    """Return whether one of these is a gradient, or as long as all of its dtype together."""
    lengths: Counter[torch.dtype] = Counter()
    places = set()
    for grad in grads:
        if grad.layout is torch.strided and grad.numel():
            lengths[grad.dtype] += grad.numel()
            places.add(place(grad))
    return any(
        lengths[one.dtype] == one.numel() or place(one) in places
        for one in sent
        if one.layout is torch.strided and one.dtype in lengths
    )


#: That of this process.
pending_sums = PendingSums()
