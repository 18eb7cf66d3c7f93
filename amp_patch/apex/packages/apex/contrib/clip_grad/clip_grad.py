"""torch's own clipping by norm, which serves lists of tensors in few launches by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Args:
        parameters: whose gradients are clipped; those without one are passed over.
        max_norm: what the norm is to be at most.
        norm_type: the p of the p-norm, inf included.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        The norm before, 0-dim.

    Raises:
        RuntimeError: the norm is not finite, and that was to be told.
    """
    return torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
    )
