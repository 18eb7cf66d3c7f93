"""Adam's step of one parameter as apex compiled it until 2019, over torch, on every device.

Libraries that carry a copy of the FusedAdam of then call it (OpenNMT-py, fairseq).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch.optimizers.deprecated_adam import deprecated_adam

__all__ = ["adam"]


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
    """Step by the formula of `deprecated_adam`.

    Args:
        p, m, v: the parameter, its average and its average of squares, of one shape; all three are
            changed in place.
        p_copy: gets the new parameter, in its own dtype; an empty tensor gets nothing.
        g: the gradient.
        lr, beta1, beta2, eps, decay: the numbers of the formula.
        grad_scale: a number, or a tensor of one element, that the gradient is divided by.
        step: of this step, from 1.
        mode: 0: eps is added to the average of squares; 1: to its root.
        bias_correction: whether the step size is corrected.
    """
    scale = float(grad_scale)
    gradient = g.detach() if scale == 1.0 else g.detach().to(v.dtype) / scale
    lists = [[gradient], [p], [m], [v]]
    deprecated_adam(lists, lr, (beta1, beta2), eps, step, mode == 0, bool(bias_correction), decay)
    if p_copy.numel() > 0:
        p_copy.data.copy_(p)
