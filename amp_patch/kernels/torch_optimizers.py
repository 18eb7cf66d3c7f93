"""The optimizers' rules on multi-tensor functions of torch: the reference, on every device.

Knows lists of dense real tensors of one dtype and device; no optimizers, groups or scales. The
order of operations is that of torch's own multi-tensor optimizers, and so are the bits.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor, _foreach_lerp_  # torch's own: `averages` replaces it later

from .strips import in_order_of

Tensors = tuple[Tensor, ...] | list[Tensor]


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Sequence[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Step by Adam (Kingma & Ba 2014, arXiv:1412.6980), or AdamW where decay is decoupled.

    Args:
        params, exp_avgs, exp_avg_sqs: changed in place.
        max_exp_avg_sqs: empty without amsgrad.
        steps: of each parameter, this one included.
    """
    beta1, beta2 = betas
    grads = _descent(grads, params, maximize, 0.0 if decoupled else weight_decay)
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    _foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    if max_exp_avg_sqs:
        torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
    denominators = torch._foreach_sqrt(max_exp_avg_sqs or exp_avg_sqs)
    torch._foreach_div_(denominators, _per_tensor(steps, lambda n: (1 - beta2**n) ** 0.5))
    torch._foreach_add_(denominators, eps)
    step_sizes = _per_tensor(steps, lambda n: (lr / (1 - beta1**n)) * -1)
    torch._foreach_addcdiv_(params, exp_avgs, denominators, step_sizes)


def fused_adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    found_inf: Tensor | None = None,
) -> None:
    """As `adam`, by the kernel of torch that ``fused=True`` asks for, which rounds in its own way.

    Args:
        steps: 0-dim float32 on the parameters' device, this step included.
        found_inf: float32, one element on that device; not 0: nothing changes.
    """
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    numbers = {
        "lr": lr,
        "beta1": betas[0],
        "beta2": betas[1],
        "weight_decay": weight_decay,
        "eps": eps,
        "amsgrad": bool(max_exp_avg_sqs),
        "maximize": maximize,
        "found_inf": found_inf,
    }
    averages = exp_avgs, exp_avg_sqs, max_exp_avg_sqs
    try:
        kernel(params, grads, *averages, steps, **numbers)
    except RuntimeError:  # on a GPU, before anything was written
        laid = _lay_alike(params, grads, averages)
        if laid is None:
            raise
        kernel(params, laid, *averages, steps, **numbers)


def _lay_alike(params: Tensors, grads: Tensors, averages: Sequence[Tensors]) -> Tensors | None:
    """Bring averages to their parameters' order of memory; return gradients in it.

    None where all lie so, and it is something else that a kernel has refused.
    """
    laid = list(map(in_order_of, params, grads))
    found = any(map(operator.is_not, laid, grads))
    for kept in averages:
        for param, average in zip(params, kept, strict=False):  # amsgrad's may be none
            new = in_order_of(param, average)
            if new is not average:
                found = True
                average.set_(new)  # type: ignore[call-overload]  # mypy knows storages alone
    return laid if found else None


def fused_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: list[Tensor | None],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    found_inf: Tensor | None = None,
) -> None:
    """As `sgd`, by the kernel of torch that ``fused=True`` asks for.

    Args:
        buffers: all of them None, or none.
        found_inf: see `fused_adam`.
    """
    is_first_step = momentum != 0 and buffers[0] is None
    if is_first_step:
        buffers[:] = list(map(torch.empty_like, grads))
    kernel: Any = torch._fused_sgd_
    kernel(
        params,
        grads,
        buffers if momentum != 0 else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=is_first_step,
        found_inf=found_inf,
    )


def sgd(
    params: Tensors,
    grads: Tensors,
    buffers: list[Tensor | None],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Step by SGD, as `torch.optim.SGD` has it.

    Args:
        params: changed in place.
        buffers: changed in place; the first step puts a tensor in the place of None. Not looked
            at without momentum.
    """
    grads = _descent(grads, params, maximize, weight_decay)
    if momentum != 0:
        are_known = list(map(operator.is_not, buffers, repeat(None)))
        known: Any = list(compress(buffers, are_known))
        if known:
            later = list(compress(grads, are_known))
            torch._foreach_mul_(known, momentum)
            torch._foreach_add_(known, later, alpha=1 - dampening)
        if len(known) < len(buffers):
            pairs = zip(grads, buffers, strict=True)
            buffers[:] = [g.detach().clone() if b is None else b for g, b in pairs]
        moving: Any = buffers
        grads = torch._foreach_add(grads, moving, alpha=momentum) if nesterov else moving
    torch._foreach_add_(params, grads, alpha=-lr)


def rmsprop(
    params: Tensors,
    grads: Tensors,
    square_avgs: Tensors,
    buffers: Tensors,
    grad_avgs: Tensors,
    *,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    maximize: bool,
) -> None:
    """Step by RMSprop (Tieleman & Hinton 2012, lecture 6.5), as `torch.optim.RMSprop` has it.

    Args:
        params, square_avgs: changed in place.
        buffers: of the momentum, changed in place; empty without.
        grad_avgs: changed in place; empty unless centered (Graves 2013, arXiv:1308.0850).
    """
    grads = _descent(grads, params, maximize, weight_decay)
    torch._foreach_mul_(square_avgs, alpha)
    torch._foreach_addcmul_(square_avgs, grads, grads, 1 - alpha)
    if grad_avgs:
        _foreach_lerp_(grad_avgs, grads, 1 - alpha)
        denominators = torch._foreach_addcmul(square_avgs, grad_avgs, grad_avgs, -1)
        torch._foreach_sqrt_(denominators)
    else:
        denominators = torch._foreach_sqrt(square_avgs)
    torch._foreach_add_(denominators, eps)
    if buffers:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_addcdiv_(buffers, grads, denominators)
        torch._foreach_add_(params, buffers, alpha=-lr)
    else:
        torch._foreach_addcdiv_(params, grads, denominators, -lr)


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Sequence[float],
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """Step by Adagrad (Duchi, Hazan & Singer 2011), as `torch.optim.Adagrad` has it.

    Args:
        params, sums: changed in place.
        steps: of each parameter, this one included.
    """
    grads = _descent(grads, params, maximize, weight_decay)
    torch._foreach_addcmul_(sums, grads, grads, 1)
    denominators = torch._foreach_sqrt(sums)
    torch._foreach_add_(denominators, eps)
    step_sizes = _per_tensor(steps, lambda n: -lr / (1 + (n - 1) * lr_decay))
    torch._foreach_addcdiv_(params, torch._foreach_mul(grads, step_sizes), denominators)


def lamb(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Sequence[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
    grad_averaging: bool,
    adapt_always: bool,
) -> None:
    """Step by LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2), as apex has it.

    The update of Adam, plus decay, is multiplied by ``lr`` and by the ratio of the norms of
    parameter and update; by ``lr`` alone where either norm is 0, or without weight decay.

    Args:
        params, exp_avgs, exp_avg_sqs: changed in place.
        grads: clipped already by their global norm.
        steps: of each parameter, this one included.
        decoupled: decay is added to the update, not to the gradient.
        grad_averaging: whether the gradient enters its average by ``1 - beta1``, or by 1.
        adapt_always: use the ratio also without weight decay.
    """
    beta1, beta2 = betas
    grads = _descent(grads, params, False, 0.0 if decoupled else weight_decay)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1 if grad_averaging else 1.0)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    corrections: Any = (1.0, 1.0)
    if bias_correction:
        corrections = [_per_tensor(steps, lambda n, beta=beta: 1 - beta**n) for beta in betas]
    updates = torch._foreach_div(exp_avgs, corrections[0])
    denominators = torch._foreach_div(exp_avg_sqs, corrections[1])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    torch._foreach_div_(updates, denominators)
    if weight_decay != 0 and decoupled:
        torch._foreach_add_(updates, params, alpha=weight_decay)
    if adapt_always or weight_decay != 0:
        torch._foreach_mul_(updates, _ratios(params, updates).unbind())
    torch._foreach_add_(params, updates, alpha=-lr)


def _descent(grads: Tensors, params: Tensors, maximize: bool, coupled_decay: float) -> Tensors:
    """Return the gradients of what is minimized: negated to maximize, then with L2 decay."""
    if maximize:
        grads = torch._foreach_neg(grads)
    if coupled_decay != 0:
        grads = torch._foreach_add(grads, params, alpha=coupled_decay)
    return grads


def _ratios(params: Tensors, updates: Tensors) -> Tensor:
    """Return the ratio of norms of each pair, 1 where either is 0."""
    ours, theirs = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, updates))
    return torch.where((ours == 0) | (theirs == 0), 1.0, ours / theirs)


def scaled(tensors: Tensors, factor: Tensor) -> list[Tensor]:
    """Return tensors of one dtype and device, multiplied by a 0-dim one on any device."""
    return list(torch._foreach_mul(tensors, factor.to(tensors[0].device, tensors[0].dtype)))


def _per_tensor(steps: Sequence[float], function: Any) -> Any:
    """Return ``function(step)`` for each, one number where all are alike: most often they are."""
    if min(steps) == max(steps):
        return function(steps[0])
    return [function(step) for step in steps]
