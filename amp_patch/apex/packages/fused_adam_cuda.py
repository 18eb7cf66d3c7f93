"""Adam's step of one parameter as apex compiled it until 2019, over torch, on every device.

Libraries that carry a copy of the FusedAdam of then call it (OpenNMT-py, fairseq).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["adam"]


@torch.no_grad()
def adam(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: Any,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Step by the formula that stands in ``apex/optimizers/deprecated_adam.py``.

    Args:
        p, m, v: the parameter, its average and its average of squares, of one shape, in float32 or
            float64; all three are changed in place.
        p_copy: gets the new parameter, in its own dtype; an empty tensor gets nothing.
        g: the gradient, of any floating dtype.
        lr, beta1, beta2, eps, decay: the numbers of the formula.
        grad_scale: a number, or a tensor of one element, that the gradient is divided by.
        step: of this step, from 1.
        mode: 0: eps is added to the average of squares; 1: to its root.
        bias_correction: whether the step size is corrected.
    """
    # A call for each parameter, of hundreds: foreach functions take the host longer for one tensor.
    scale, step_size = float(grad_scale), float(lr)
    if bias_correction:
        step_size *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    g = g.to(v.dtype)
    if scale != 1.0:
        g = g / scale
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v + eps).sqrt_() if mode == 0 else v.sqrt().add_(eps)
    if decay != 0:
        p.mul_(1 - step_size * decay)
    p.addcdiv_(m, denominator, value=-step_size)
    if p_copy.numel() > 0:
        p_copy.copy_(p)
