"""Lists of tensors multiplied and added, with a check for what is not finite.

The arithmetic is that of float32 also for half tensors, rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_patch.kernels import alike
from amp_patch.kernels.torch_norms import norms_of
from amp_patch.levels import HALVES

from .tensor_lists import Lists, columns_of, raise_flag, widened


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write ``inputs * scale`` to outputs, and flag inputs that are not finite.

    Args:
        chunk_size: without effect.
        noop_flag: int32, shape (1,); set to 1 where an input holds inf or NaN, which is written
            out all the same. Its value before is not looked at.
        tensor_lists: [inputs, outputs], of any floating dtypes; an output may be its input.
        scale: the factor.
    """
    for inputs, outputs in alike(*columns_of(tensor_lists, 2)):
        raise_flag(noop_flag, has_nonfinite(inputs))
        _multiply_into(outputs, inputs, float(scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Write ``a * x + b * y`` to outputs, and flag inputs that are not finite.

    Args:
        chunk_size: without effect.
        noop_flag: as of `multi_tensor_scale`.
        tensor_lists: [x, y, outputs], of any floating dtypes; an output may be x or y.
        a, b: the factors.
        arg_to_check: 0: only x is checked; 1: only y; -1: both.
    """
    for xs, ys, outputs in alike(*columns_of(tensor_lists, 3)):
        for index, checked in enumerate((xs, ys)):
            if arg_to_check in (-1, index):
                raise_flag(noop_flag, has_nonfinite(checked))
        wide_xs, wide_ys = widened([xs, ys])
        sums = torch._foreach_mul(wide_xs, float(a))
        torch._foreach_add_(sums, torch._foreach_mul(wide_ys, float(b)))
        torch._foreach_copy_(outputs, sums)


def has_nonfinite(tensors: list[Tensor]) -> Tensor:
    """Return whether tensors of one dtype and device hold inf or NaN: bool, 0-dim, there."""
    full = [tensor for tensor in tensors if tensor.numel() > 0]
    if not full:
        return torch.zeros((), dtype=torch.bool, device=tensors[0].device)
    return ~torch.isfinite(torch.stack(norms_of(full, math.inf))).all()


def _multiply_into(outputs: list[Tensor], inputs: list[Tensor], scale: float) -> None:
    if outputs[0].dtype in HALVES and outputs[0].dtype is not inputs[0].dtype:
        (wide,) = widened([inputs])
        torch._foreach_copy_(outputs, torch._foreach_mul(wide, scale))
        return
    if any(ours is not theirs for ours, theirs in zip(outputs, inputs, strict=True)):
        torch._foreach_copy_(outputs, inputs)
    torch._foreach_mul_(outputs, scale)
