"""The loss scalers from before ``apex.amp``; they know of no model and no optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class _Scaler:
    """What both scalers do with their scale, ``cur_scale``."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The present scale."""
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: tuple[Tensor | None, ...], grad_out: Any
    ) -> tuple[Tensor | None, ...]:
        """Return grad_in times the scale; to be registered as a full backward hook."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of loss, a scalar of any floating dtype, times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A scale that stays as it is.

    Attributes:
        cur_scale: what losses are multiplied by.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: with a fixed scale nothing is looked for."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale as it is."""


class DynamicLossScaler(_Scaler):
    """A scale that falls at an overflow and rises after a window of iterations without one.

    Every iteration calls ``update_scale(overflow)``::

        overflow:  scale = max(scale / scale_factor, 1)
        else, and iterations since the last overflow (or the start) are a multiple of scale_window:
                   scale = scale * scale_factor

    Args:
        init_scale: the first scale.
        scale_factor: by how much it changes.
        scale_window: iterations between two rises.

    Attributes:
        cur_scale: what losses are multiplied by.
        cur_iter: number of calls of `update_scale`.
        last_overflow_iter: the call that had the last overflow; -1 before the first.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of these parameters has an inf or a NaN."""
        return any(
            param.grad is not None and not bool(torch.isfinite(param.grad).all())
            for param in params
        )

    def update_scale(self, overflow: bool) -> None:
        """End an iteration by the rule above."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
