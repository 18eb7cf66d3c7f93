"""torch's layer norm and RMS norm under apex's names and rules of dtypes; knows no module.

Inputs and weights may have different floating dtypes; means and variances are float32's at least.
Inside torch.autocast the output has autocast's dtype; elsewhere the input's or, from what is
named mixed, the weight's. ``memory_efficient`` has no effect: torch keeps the input alone anyway.

Sources: Ba et al., arXiv:1607.06450 (layer norm); Zhang and Sennrich, arXiv:1910.07467 (RMS norm).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Shape = int | Sequence[int]


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the input normalized over its last dimensions.

    Args:
        input: shape (..., *normalized_shape), any floating dtype.
        normalized_shape: the last dimensions.
        eps: added to the variance.
        memory_efficient: no effect.
    """
    return layer_norm(input, normalized_shape, None, None, eps).to(output_dtype(input))


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As `fused_layer_norm`, times weight, plus bias.

    Args:
        weight, bias: shape normalized_shape, any floating dtype.
    """
    return layer_norm(input, normalized_shape, weight, bias, eps).to(output_dtype(input))


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As `fused_layer_norm_affine`; the output has the weight's dtype."""
    return layer_norm(input, normalized_shape, weight, bias, eps).to(output_dtype(weight))


def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the input over the root of the mean of its squares, plus eps, in the last dimensions.

    Args:
        input, normalized_shape, eps, memory_efficient: as `fused_layer_norm`.
    """
    return rms_norm(input, normalized_shape, None, eps).to(output_dtype(input))


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As `fused_rms_norm`, times weight: shape normalized_shape, any floating dtype."""
    return rms_norm(input, normalized_shape, weight, eps).to(output_dtype(input))


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """As `fused_rms_norm_affine`; the output has the weight's dtype."""
    return rms_norm(input, normalized_shape, weight, eps).to(output_dtype(weight))


def manual_rms_norm(
    input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float
) -> Tensor:
    """As `fused_rms_norm_affine`; the output has the weight's dtype, without one float32 at least.

    Args:
        weight: shape normalized_shape; None for none.
    """
    float32_at_least = torch.promote_types(input.dtype, torch.float32)
    output = rms_norm(input, normalized_shape, weight, eps)
    return output.to(float32_at_least if weight is None else weight.dtype)


def layer_norm(
    input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return torch's layer norm; where the dtypes differ, in the widest, float32 at least."""
    input, weight, bias = _of_one_dtype(input, weight, bias)
    return functional.layer_norm(input, size(shape), weight, bias, eps)


def rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Return torch's RMS norm; where the dtypes differ, in the widest, float32 at least."""
    input, weight = _of_one_dtype(input, weight)
    return functional.rms_norm(input, list(size(shape)), weight, eps)


def size(shape: Shape) -> torch.Size:
    """Return the last dimensions, of which one may be given as an int."""
    return torch.Size([shape] if isinstance(shape, int) else shape)


def output_dtype(like: Tensor) -> torch.dtype:
    """Return autocast's dtype where it is on, as apex's norms did, else the tensor's."""
    device = like.device.type
    # torch's own answers: beside the casts of O1 and O4 the norm goes by its input, as apex's did.
    if not torch.amp.is_autocast_available(device) or not torch._C.is_autocast_enabled(device):
        return like.dtype
    return torch._C.get_autocast_dtype(device) if like.dtype != torch.float64 else like.dtype


def _of_one_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors of one dtype as they are, others in the widest, which is float32 at least."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) == 1:
        return tensors
    widest = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(widest) for tensor in tensors)
