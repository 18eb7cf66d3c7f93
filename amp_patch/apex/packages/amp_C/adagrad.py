"""Adagrad over lists of tensors, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike

from .tensor_lists import Lists, columns_of, widened, write_back


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Step by Adagrad (Duchi, Hazan & Singer 2011).

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex: what is not finite goes into the parameters.
        tensor_lists: [gradients, parameters, sums of squares], of any floating dtypes; the
            latter two are changed in place.
        lr, epsilon, weight_decay: the numbers of the formula.
        mode: 0: decay is added to the gradient (L2); 1: to the update, as AdamW does.
    """
    for columns in alike(*columns_of(tensor_lists, 3)):
        wide = widened(columns)
        grads, params, sums = wide
        if mode == 0 and weight_decay != 0:
            grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
        torch._foreach_addcmul_(sums, grads, grads, 1.0)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, epsilon)
        if mode == 1 and weight_decay != 0:
            torch._foreach_mul_(params, 1 - float(lr) * weight_decay)
        torch._foreach_addcdiv_(params, grads, denominators, -float(lr))
        write_back(columns[1:], wide[1:])
