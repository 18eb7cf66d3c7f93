"""The cross-entropy of logits and class indices by the CUDA kernels of csrc/; knows two tensors.

Torch's own makes float32 tensors as large as the logits: of half logits a cast, the log_softmax,
and two in the backward. The kernels read the logits as they are, and write nothing as large but
their gradient. What is kept for the backward is the logits and two numbers of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.compiler import is_compiling

from . import cuda_module
from .cuda_module import DTYPE_NAMES, Kernel

#: The CUDA sources that are needed.
SOURCES = ("cross_entropy.cu",)
REDUCTIONS = ("mean", "sum", "none")
#: Of fewer logits torch's take little memory, and the host's time is all that counts.
MIN_LOGITS = 2**20
#: A block of threads works on a row. Of fewer classes most of it would be idle, where torch has
#: kernels for short rows.
MIN_CLASSES = 1024
#: The kernels count the elements of a row by an int.
MAX_CLASSES = 2**30

_FORWARD = {
    dtype: Kernel("cross_entropy.cu", f"cross_entropy_{name}", "PPiqPP")
    for dtype, name in DTYPE_NAMES.items()
}
_BACKWARD = {
    dtype: Kernel("cross_entropy.cu", f"cross_entropy_backward_{name}", "PPiqPPqP")
    for dtype, name in DTYPE_NAMES.items()
}


def takes(logits: Tensor, targets: Tensor) -> bool:
    """Tell whether there are kernels for logits and targets, wherever these are; and a gain."""
    return (
        logits.dim() == 2
        and logits.numel() >= MIN_LOGITS
        and MIN_CLASSES <= logits.shape[1] <= MAX_CLASSES
        and logits.dtype in DTYPE_NAMES
        and logits.layout is torch.strided
        and not logits.is_neg()
        and targets.dtype is torch.int64
        and targets.layout is torch.strided
        and not targets.is_neg()
        and targets.shape == logits.shape[:1]
        and targets.device == logits.device
    )


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return torch's cross-entropy of these, in float32; without waiting for the device.

    Args:
        logits: rows that `takes` allows, on a device that the kernels are loaded for.
        targets: the class of each row.
        ignore_index: a row with this target has the loss 0 and the gradient 0.
        reduction: one of `REDUCTIONS`; the mean is of the rows that are not ignored.
    """
    logits, targets = logits.contiguous(), targets.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        losses: Tensor = _Losses.apply(logits, targets, ignore_index)
    else:
        losses, _ = _forward(logits, targets, ignore_index)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _Context(FunctionCtx):
    """What the backward of `_Losses` gets of its forward."""

    ignore_index: int
    saved_tensors: tuple[Tensor, Tensor, Tensor]


class _Losses(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        losses, totals = _forward(logits, targets, ignore_index)
        ctx.save_for_backward(logits, targets, totals)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    def backward(ctx: _Context, *factors: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, totals = _saved(ctx)
        # Of a gradient that is to be differentiated itself, or that a transform or torch.compile
        # makes of many factors or of none yet.
        compute = _gradient if _is_plain(factors[0]) else _differentiable_gradient
        return compute(logits, targets, totals, ctx.ignore_index, factors[0]), None, None


def _saved(ctx: _Context) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors, dense whatever hooks for saved tensors made of them.

    Raises:
        RuntimeError: they were written to since, or the graph's memory is gone.
    """
    try:
        logits, targets, totals = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "logits that a CUDA kernel made a cross_entropy of are read again by its backward, so "
            "that they must stay as they are until then; got some that were written to, or their "
            "targets; call cross_entropy(logits.clone(), targets), also where other rows of the "
            "same memory are written to, or set AMP_PATCH_KERNELS=torch, with which cross_entropy "
            "keeps a float32 copy."
        ) from error
    return logits.contiguous(), targets.contiguous(), totals.contiguous()


def _is_plain(factors: Tensor) -> bool:
    # torch.vmap's stand for several tensors, and have no memory of their own
    is_one = type(factors) is Tensor and _has_storage(factors)
    return is_one and not (torch.is_grad_enabled() or is_compiling())


_has_storage = torch._C._has_storage


def _forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the two numbers that the backward needs of each."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    totals = torch.empty(rows, 2, dtype=torch.float32, device=logits.device)
    arguments = (logits, targets, classes, ignore_index, losses, totals)
    cuda_module.modules.launch(_FORWARD[logits.dtype], rows, logits.device, *arguments)
    return losses, totals


def _gradient(
    logits: Tensor, targets: Tensor, totals: Tensor, ignore_index: int, factors: Tensor
) -> Tensor:
    """Return the gradient of the logits, given that of each loss."""
    rows, classes = logits.shape
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    factors = factors.resolve_neg()  # of which memory would have the other sign
    # after a reduction all rows have the same, a tensor of stride 0
    operands = (totals, factors, factors.stride(0), gradient)
    arguments = (logits, targets, classes, ignore_index, *operands)
    cuda_module.modules.launch(_BACKWARD[logits.dtype], rows, logits.device, *arguments)
    return gradient


def _differentiable_gradient(
    logits: Tensor, targets: Tensor, totals: Tensor, ignore_index: int, factors: Tensor
) -> Tensor:
    """Return the same by torch's operations, which autograd and transforms know."""
    ignored = targets == ignore_index
    classes = targets.masked_fill(ignored, 0).unsqueeze(1)
    probabilities = logits.softmax(1, dtype=torch.float32)
    at_target = torch.zeros_like(probabilities).scatter_(1, classes, 1.0)
    gradient = (probabilities - at_target) * factors.unsqueeze(1)
    return gradient.masked_fill(ignored.unsqueeze(1), 0.0).to(logits.dtype)
