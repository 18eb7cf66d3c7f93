"""Gradients that a script averages over ranks in the last of several blocks of a step.

A block has the gradients of its own backward: those of the blocks before wait aside, where no
collective reaches them, and the ranks would train apart. Knows what was prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from amp_patch.common.early_looks import EarlyLooks
from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.warn_once import warn_once
from amp_patch.distributed.pending_sums import are_gradients
from amp_patch.step.optimizer_backward import OptimizerBackward

#: How many collectives of other tensors are looked at: each is compared with all gradients.
_MOST = 64


class SplitAverages:
    """Looks at what a script sends to other ranks in its blocks.

    Args:
        backwards: returns those of the prepared optimizers.
        averaged_among: returns those of some parameters whose gradients `DistributedDataParallel`
            averages.
    """

    def __init__(
        self,
        backwards: Callable[[], Iterable[OptimizerBackward]],
        averaged_among: Callable[[Iterable[Tensor]], Sequence[Tensor]],
    ) -> None:
        self._backwards, self._averaged_among = backwards, averaged_among
        # of which it is known whether the script averages in each block
        self._known: weakref.WeakSet[OptimizerBackward] = weakref.WeakSet()
        self._looks = EarlyLooks(_MOST)

    def look(self, sent: Sequence[Tensor]) -> None:
        """A collective sums these over ranks; warn, once, where they are a part of a step's."""
        if not self._looks.left or is_in_backward():
            return  # in a backward it is an engine that averages, or a hook, which comes with each
        opened = [
            one for one in self._backwards() if one.current.is_open and one not in self._known
        ]
        if not opened:
            return
        for one in opened:
            params = one.pairs().model
            grads = [grad for param in params if (grad := param.grad) is not None]
            if not are_gradients(sent, grads):
                self._looks.count()
                continue
            self._known.add(one)
            is_sum = one.gradients.scaled.scale is not None  # of blocks with ``delay_unscale``
            if one.zeroing.has_earlier and not is_sum and not self._averaged_among(params):
                _warn()


def _warn() -> None:
    warn_once(
        "gradients that a script averages over ranks must be all of a step; got those of the last "
        "of several scale_loss() blocks, averaged inside of it, where the ones of the blocks "
        "before wait aside: the ranks train apart. Call amp.scale_loss(loss, optimizer, "
        "delay_unscale=True) in all blocks but the last, or average those of "
        "amp.master_params(optimizer) after it."
    )
