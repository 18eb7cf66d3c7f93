"""Norms of gradients and clipping by them, by the CUDA kernels of csrc/; knows lists of tensors.

A norm is told from sums of squares that passes over the gradients left on the device. The names are
torch_norms'; gradients that no kernel takes go there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import cuda_module, torch_kernels
from .cuda_module import Kernel
from .cuda_unscale import Statistics, examine
from .dense_rows import chosen, split
from .torch_norms import CLIP_EPS
from .without_grad import without_grad

_CLIP_COEFFICIENT = Kernel("summarize.cu", "clip_coefficient", "PffPP", 32)


@without_grad
def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """See `torch_kernels.clip_by_norm`; the norm is taken in one pass where it is the 2-norm."""
    if norm_type != 2.0 or norm is not None:
        return torch_kernels.clip_by_norm(grads, max_norm, norm_type, norm)
    return clip_together((), grads, max_norm)[0]


@without_grad
def clip_together(
    squares: Sequence[Tensor],
    grads: Sequence[Tensor],
    max_norm: float,
    accept: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Clip gradients in place, together with others that the caller multiplies.

    Args:
        squares: sums of the others' squares, float64, 0-dim, on any devices.
        grads: as `torch_kernels.clip_by_norm` takes them.
        max_norm: what the 2-norm of all is to be at most.
        accept: gets that norm before anything is clipped, and raises to have nothing clipped.

    Returns:
        That norm before, and what the gradients were multiplied by; both 0-dim.
    """
    ours, others = squares_of(grads)
    squares = [*squares, *ours]
    if others or not squares:
        rest = torch_kernels.norms_of(chosen(grads, others), 2.0)
        norms = [*(one.sqrt().float() for one in squares), *rest]
        norm = torch_kernels.combined(norms, 2.0)
        factor = torch_kernels.clip_factor(norm, max_norm, CLIP_EPS)
    else:
        norm, factor = clip_factor(squares, max_norm, CLIP_EPS)
    if accept is not None:
        accept(norm)
    torch_kernels.multiply(grads, factor)
    return norm, factor


@without_grad
def squares_of(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Add up the squares of gradients, in one pass.

    Args:
        grads: on any devices.

    Returns:
        A sum for each device, float64, 0-dim; and the indices of those that no kernel takes, which
        are in none of the sums.
    """
    parts, others = split("squares_of", grads, grads)
    statistics = [Statistics(part, None) for part in parts]
    for one in statistics:
        examine(one, chosen(grads, one.part.rows), [None] * len(one.part.rows), None)
    return [one.squares() for one in statistics], others


def clip_factor(squares: Sequence[Tensor], max_norm: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return a norm, and `torch_norms.clip_factor` of it; one launch where there is one sum.

    Args:
        squares: sums of squares, float64, 0-dim, on any devices; not empty.
        max_norm, eps: as there.

    Returns:
        The 2-norm, and what multiplies the gradients; 0-dim fp32, on the first sum's device.
    """
    total, device = squares[0], squares[0].device
    if len(squares) > 1:
        total = torch.stack([one.to(device) for one in squares]).sum()
    norm, factor = torch.empty(2, dtype=torch.float32, device=device).unbind()
    arguments = (total, max_norm, eps, norm, factor)
    cuda_module.modules.launch(_CLIP_COEFFICIENT, 1, device, *arguments)
    return norm, factor
