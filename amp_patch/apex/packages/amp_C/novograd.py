"""NovoGrad over lists of tensors, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike

from .norms import norm_of_each
from .tensor_lists import Lists, columns_of, like, widened, write_back


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Step by NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286).

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex: what is not finite goes into the parameters.
        tensor_lists: [gradients, parameters, averages], of any floating dtypes; the latter two
            are changed in place.
        grad_norms: float32, shape (number of tensors,), the averages of the gradients' norms (not
            squared); changed in place.
        lr, beta1, beta2, epsilon, weight_decay: the numbers of the formula.
        step: of this step, from 1.
        bias_correction: whether averages are divided by ``1 - beta1 ** step``, and norms by
            ``sqrt(1 - beta2 ** step)``.
        grad_averaging: whether the gradient enters its average by ``1 - beta1``, or by 1.
        mode: 0: what is averaged is the divided gradient plus decay; 1: the gradient, which is
            divided afterwards.
        norm_type: 2, or 0 for the largest magnitude.
    """
    lists = columns_of(tensor_lists, 3)
    if not lists[0]:
        return
    _average_norms(grad_norms, norms_of(lists[0], norm_type), beta2, norm_type)
    corrections = 1.0, 1.0
    if bias_correction:
        corrections = 1 - beta1**step, (1 - beta2**step) ** 0.5
    share = 1 - beta1 if grad_averaging else 1.0
    denominators = (grad_norms / corrections[1] + epsilon).unbind()
    for *columns, divisors in alike(*lists, denominators):
        wide = widened(columns)
        grads, params, averages = wide
        if mode == 0:
            grads = _divided(grads, divisors)
            if weight_decay != 0:
                torch._foreach_add_(grads, params, alpha=weight_decay)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, grads, alpha=share)
        updates = list(torch._foreach_div(averages, corrections[0]))
        if mode == 1:
            updates = _divided(updates, divisors)
            if weight_decay != 0:
                torch._foreach_add_(updates, params, alpha=weight_decay)
        torch._foreach_add_(params, updates, alpha=-float(lr))
        write_back(columns[1:], wide[1:])


def norms_of(grads: list[Tensor], norm_type: int) -> Tensor:
    """Return the norm of each gradient: float32, shape (number of gradients,).

    Raises:
        RuntimeError: a norm that is neither the 2-norm nor the largest magnitude.
    """
    if norm_type == 2:
        return norm_of_each(grads)
    if norm_type == 0:
        device = grads[0].device
        largest = [g.abs().max() if g.numel() else g.new_zeros(()) for g in grads]
        return torch.stack([norm.to(device, torch.float32) for norm in largest])
    raise RuntimeError(
        f"norm_type must be 2, or 0 for the largest magnitude; got {norm_type!r}; call "
        "FusedNovoGrad(..., norm_type=2)."
    )


def _average_norms(averages: Tensor, norms: Tensor, beta2: float, norm_type: int) -> None:
    norms = norms.to(averages.device)
    if norm_type == 2:
        averages.square_().mul_(beta2).add_(norms.square(), alpha=1 - beta2).sqrt_()
    else:
        averages.mul_(beta2).add_(norms, alpha=1 - beta2)


def _divided(tensors: list[Tensor], divisors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_div(tensors, like(tensors, divisors)))
