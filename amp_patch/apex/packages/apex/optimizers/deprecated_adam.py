"""The formula of apex's Adam until September 2019, over lists of tensors; knows no optimizer.

It differs from AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) in two places::

    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad ** 2
    step_size = lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step)
    denominator = sqrt(exp_avg_sq) + eps        # or sqrt(exp_avg_sq + eps); not yet corrected
    param -= step_size * (exp_avg / denominator + weight_decay * param)    # AdamW: lr decays
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike


@torch.no_grad()
def deprecated_adam(
    lists: list[list[Tensor]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    """Step by the formula above, computed in float32 (float64 for float64 parameters).

    Args:
        lists: gradients, parameters, averages, averages of squares; of any floating dtypes, all but
            the gradients are changed in place.
        lr, betas, eps, weight_decay: the numbers of the formula.
        step: of this step, from 1.
        eps_inside_sqrt: add eps to the average of squares, not to its root.
        bias_correction: whether the step size is corrected; else it is ``lr``.
    """
    beta1, beta2 = betas
    step_size = float(lr)
    if bias_correction:
        step_size *= (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    for columns in alike(*lists):
        dtype = torch.promote_types(columns[1][0].dtype, torch.float32)
        wide = [[tensor.to(dtype) for tensor in column] for column in columns]
        grads, params, averages, squares = wide
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        if eps_inside_sqrt:
            denominators = torch._foreach_sqrt(torch._foreach_add(squares, eps))
        else:
            denominators = torch._foreach_add(torch._foreach_sqrt(squares), eps)
        updates = torch._foreach_div(averages, denominators)
        if weight_decay != 0:
            torch._foreach_add_(updates, params, alpha=weight_decay)
        torch._foreach_add_(params, updates, alpha=-step_size)
        for column, copies in zip(columns[1:], wide[1:], strict=True):
            if column[0].dtype is not dtype:
                torch._foreach_copy_(column, copies)
