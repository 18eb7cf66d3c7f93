"""Norms of gradients and clipping by them, on multi-tensor functions of torch.

The norm of half gradients is taken in fp32, for their squares would overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.levels import HALVES

from .default_device import without_default_device
from .getters import IS_CPU, IS_SPARSE
from .tensor_lists import alike, dense, values
from .tensor_values import is_large, largest
from .without_grad import without_grad

#: What is added to the norm where gradients are clipped as `torch.nn.utils.clip_grad_norm_` does.
CLIP_EPS = 1e-6


@without_grad
def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Args:
        grads: dense or sparse, of any floating or complex dtype, on any devices.
        max_norm: what the norm is to be at most.
        norm_type: the p of the p-norm, inf included.
        norm: their total norm where it is known, as `GradCheck.norm` tells it; saves a pass.

    Returns:
        The total norm before, 0-dim fp32 (float64 if a gradient is), on the first device.
    """
    total = total_norm(grads, norm_type) if norm is None else norm
    multiply(grads, clip_factor(total, max_norm, CLIP_EPS))
    return total


def clip_factor(norm: Tensor, max_norm: float, eps: float = 0.0) -> Tensor:
    """Return what multiplies gradients of this norm, so that it is at most ``max_norm`` then.

    Args:
        norm: 0-dim, of all gradients together.
        max_norm: above 0.
        eps: added to the norm.

    Returns:
        ``min(1, max_norm / (norm + eps))``, 0-dim; 1 for a norm of 0.
    """
    factor: Tensor = (max_norm / (norm + eps if eps else norm)).clamp(max=1.0)
    return factor


@without_default_device
def multiply(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim fp32 or float64 tensor, on whatever device it is."""
    for (group,) in alike(dense(grads)):
        used = factor.to(group[0].device, non_blocking=True)
        if group[0].dtype in HALVES and not group[0].is_cpu:
            # CUDA would round the factor to half, which a large norm makes 0 there.
            wide = list(map(Tensor.float, group))
            torch._foreach_mul_(wide, used)
            torch._foreach_copy_(group, wide)
        else:
            torch._foreach_mul_(group, used)


def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all gradients, 0-dim fp32 or float64, on the first one's device."""
    return combined(norms_of(grads, norm_type), norm_type)


@without_default_device
def norms_of(grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each gradient that has elements, 0-dim fp32 or float64."""
    if norm_type == math.inf and any(map(is_large, grads)):
        every = (grad for grad in grads if values(grad).numel() > 0)
        return [largest(one) if is_large(one) else _norm(one, norm_type) for one in every]
    if not any(map(IS_SPARSE, grads)):
        groups = alike([grad for grad in grads if grad.numel() > 0])
        if len(groups) == 1:  # else they would come in another order
            (group,) = groups[0]
            wide = torch.float32 if group[0].dtype in HALVES else None
            return list(torch._foreach_norm(group, norm_type, dtype=wide))
    return [_norm(grad, norm_type) for grad in grads if values(grad).numel() > 0]


def combined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all numbers, of the p-norms of disjoint sets of them.

    Args:
        norms: 0-dim, on any devices.
        norm_type: the p.

    Returns:
        0-dim, on the first norm's device; 0 for no norms.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    return _norm_of_norms(norms, norm_type)


@without_default_device
def _norm_of_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    if not all(map(IS_CPU, norms)):
        norms = [norm.to(norms[0].device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    dtype = torch.float32 if grad.dtype in HALVES else grad.dtype
    if grad.is_sparse:
        # Entries of one index count as their sum.
        grad = grad.to(dtype).coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm
