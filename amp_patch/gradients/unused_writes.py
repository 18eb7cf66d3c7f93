"""Writes to half gradients that no step reads, for their masters have received theirs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from amp_patch.common.warn_once import warn
from amp_patch.weights.lazy_gradients import LazyGradients

from .half_gradients import HalfGradients, LargeInHalf
from .param_pairs import ParamPairs
from .received_gradients import Changes, ReceivedGradients


class UnusedWrites:
    """Warns once of the writes to the half gradients of one optimizer.

    Args:
        received: half gradients as they were when masters received them.
        lazy: see `Gradients`.
    """

    def __init__(self, received: ReceivedGradients, lazy: LazyGradients | None) -> None:
        self._received, self._lazy = received, lazy
        self._has_warned = False

    def tell(self, pairs: ParamPairs) -> None:
        """Warn where half gradients hold other numbers than their masters were given."""
        if self._received and not self._has_warned and not self._received.are_untouched():
            self.tell_of_changes(self._received.changes(pairs))

    def tell_of_changes(self, changes: Changes, taken: Collection[Tensor] = ()) -> None:
        """Warn of what a script has written to half gradients, or put in their place.

        Args:
            changes: found.
            taken: parameters of which masters are given what was put there.
        """
        for grad in changes.written:
            self._tell_of(grad, is_another=False)
        known = set(map(id, taken))
        for param in changes.given.model:
            if id(param) not in known:
                self._tell_of(param.grad, is_another=True)

    def _tell_of(self, grad: Any, is_another: bool) -> None:
        """Warn of a write to a half gradient that no step reads; to one that waits it is refused.

        Args:
            grad: of the parameter, as it is.
            is_another: it took the place of the one that the backward wrote.

        Raises:
            RuntimeError: see `UnscaledLater.refuse_write_to`.
        """
        source = None if self._lazy is None else self._lazy.source
        if isinstance(source, LargeInHalf):
            source.refuse_write_to(grad)
        # kernels refuse to step with one that was written to
        if not self._has_warned and (is_another or not isinstance(source, HalfGradients)):
            self._has_warned = True
            warn(
                "What is written to the gradients of half parameters after scale_loss() has no "
                "effect, for the optimizer steps fp32 masters, which have received theirs; got "
                "such a write. Write to those of amp.master_params(optimizer); call "
                "amp.clip_grad_norm_(optimizer, max_norm) to clip; put every backward() into a "
                "scale_loss() of all the optimizers that it is to train."
            )
