"""The ``with`` block of `amp.scale_loss` in which nothing is scaled, and no master waits.

That is so at O0, O3 and O4, and at a static scale of 1 without masters. The casts of weights follow
the backward, and the pass is counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.casting.torch_compile import never_trace
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.levels import HALVES

from .loss_scaling import NoScaling
from .scaled_loss import LossBlock


class UnscaledLoss(LossBlock):
    """Yields a loss whose gradients are true as the backward writes them: no scale, no masters.

    Does what a `ScaledLoss` would do with them, which is next to nothing.

    Args:
        loss: a tensor of any shape.
        cache: told when the backward begins, and made stale when it is done.
        scaling: counts the pass.
    """

    def __init__(self, loss: Tensor, cache: WeightCache, scaling: NoScaling) -> None:
        self._loss, self._cache, self._scaling = loss, cache, scaling

    @never_trace
    def __enter__(self) -> Tensor:
        self._cache.begin_backward()
        if self._loss.dtype not in HALVES:
            return self._loss
        with torch.enable_grad():
            return self._loss.float()

    @never_trace
    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._cache.mark_stale()
        if exc_type is None:
            self._scaling.update((), ())
