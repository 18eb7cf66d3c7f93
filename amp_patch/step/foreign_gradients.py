"""Gradients that the backward of another optimizer's scaled loss wrote; knows no optimizer.

Say that a generator's loss runs through the discriminator, whose optimizer was not given to that
``scale_loss``: its gradients are multiplied by a loss scale that nobody takes out again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import kernels
from amp_patch.weights.lazy_gradients import stored_grad


class Watch(NamedTuple):
    """Parameters with their gradients as they were, and how many own passes there had been."""

    rows: list[tuple[Tensor, Tensor | None, int]]
    own_passes: int


class ForeignGradients:
    """Which of one optimizer's parameters have such gradients.

    Attributes:
        found: parameters with these gradients, of which some may be gone; None for one that an own
            pass has added to. Cleared by whoever clears or steps all gradients.
        own_passes: how many passes of the optimizer itself have ended, perhaps inside of the one
            that is watched; counted by whoever ends them.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, TensorWeakRef | None]] = []
        self.own_passes = 0

    def watch(self, params: Sequence[Tensor]) -> Watch:
        """Return what `note` needs after a backward that these parameters are not meant to get."""
        grads = [(param, stored_grad(param)) for param in params]
        rows = [(p, grad, 0 if grad is None else grad._version) for p, grad in grads]
        return Watch(rows, self.own_passes)

    def note(self, watch: Watch, unscaled: Collection[int]) -> None:
        """Find out what that backward wrote.

        Args:
            watch: what `watch` returned before it.
            unscaled: ids of the parameters whose gradients another optimizer unscales.
        """
        for param, grad, version in watch.rows if watch.own_passes == self.own_passes else ():
            now = stored_grad(param)
            is_written = now is not None and (now is not grad or now._version != version)
            if now is not None and is_written and id(param) not in unscaled:
                self.found.append((param, TensorWeakRef(now)))

    def add_to(self) -> None:
        """A pass of the optimizer itself begins, and adds to those not dropped or set to zero."""
        left = [(param, None) for param, grad in self._left() if kernels.values(grad).any()]
        self.found[:] = left

    def drop(self, cleared: Collection[int]) -> None:
        """The user clears the gradients of these parameters, by their ids."""
        self.found = [row for row in self.found if id(row[0]) not in cleared]

    def refuse(self, caller: str) -> None:
        """Raise where there are any.

        Raises:
            RuntimeError: as said.
        """
        count = len(self._left())
        if count:
            raise RuntimeError(
                f"{caller} needs unscaled gradients; got {count} that the backward() of a "
                "scale_loss() wrote which was not given this optimizer: they are multiplied by "
                "the loss scale. Call amp.scale_loss(loss, [optimizer, other_optimizer]) with "
                "all that the loss is to train, or optimizer.zero_grad() before its own "
                "backward()."
            )

    def _left(self) -> list[tuple[Tensor, Tensor]]:
        now = ((param, stored_grad(param), noted) for param, noted in self.found)
        return [
            (param, grad)
            for param, grad, noted in now
            if grad is not None and (noted is None or grad is noted())
        ]
