"""The optimizer of apex.amp's older interface: ``handle.wrap_optimizer(optimizer)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from amp_patch import amp

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer, and a loss scale for each of the losses that one step has.

    Args:
        optimizer: of torch; everything not found here is asked of it.
        amp_handle: what made this.
        num_loss: how many ``scale_loss`` blocks come before each step.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0

    @property
    def optimizer(self) -> Any:
        """The optimizer inside."""
        return self._optimizer

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Scale the next of a step's losses for its backward.

        Raises:
            IndexError: more than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_on:
            yield loss
            return
        with amp.scale_loss(loss, self._optimizer, loss_id=self._loss_idx) as scaled_loss:
            yield scaled_loss
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Step, unless one of the losses overflowed."""
        self._loss_idx = 0
        result = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        if self._amp_handle.is_on and amp.step_was_skipped(self._optimizer):
            print("Gradient overflow, skipping update")
        return result

    def __getattr__(self, attr: str) -> Any:
        if attr.startswith("__") or attr == "_optimizer":
            raise AttributeError(attr)
        return getattr(self._optimizer, attr)

    def __repr__(self) -> str:
        return repr(self._optimizer)
