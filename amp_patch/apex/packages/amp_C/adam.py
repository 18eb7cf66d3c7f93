"""Adam over lists of tensors, computed in float32, by torch's own fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch.kernels import alike, multiply

from .tensor_lists import Lists, columns_of, widened, write_back

#: 1 - beta ** inf is 1, the correction that corrects nothing.
_FOREVER = float("inf")


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Step by Adam (Kingma & Ba 2015, arXiv:1412.6980) or AdamW (Loshchilov & Hutter 2019).

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex: what is not finite goes into the parameters.
        tensor_lists: [gradients, parameters, averages, averages of squares], of any floating
            dtypes; all but the gradients are changed in place.
        lr, beta1, beta2, epsilon, weight_decay: the numbers of the formula.
        step: of this step, from 1.
        mode: 0: decay is added to the gradient (L2); 1: to the update (AdamW).
        bias_correction: whether the averages are divided by ``1 - beta ** step``.
    """
    options = _options(lr, beta1, beta2, epsilon, weight_decay)
    for columns in alike(*columns_of(tensor_lists, 4)):
        wide = widened(columns)
        _step(wide, mode, step, bias_correction, options)
        write_back(columns[1:], wide[1:])


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_adam`, with all that changes between steps in tensors; waits for nothing.

    Args:
        chunk_size: without effect.
        noop_flag: int32, shape (1,); nothing changes where it is 1.
        tensor_lists: as of `multi_tensor_adam`. Gradients are changed, too: multiplied.
        lr, step: one element each, on the tensors' device.
        beta1, beta2, epsilon, mode, bias_correction, weight_decay: as of `multi_tensor_adam`.
        inv_scale: float32, one element, by which gradients are multiplied first.
    """
    lists = columns_of(tensor_lists, 4)
    options = _options(lr.reshape(()), beta1, beta2, epsilon, weight_decay)
    for columns in alike(*lists):
        wide = widened(columns)
        _multiply_unless(noop_flag, wide[0], inv_scale)
        _step(wide, mode, step, bias_correction, options, noop_flag)
        write_back(columns, wide)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_adam_capturable`, on master weights that the parameters are copies of.

    Args:
        chunk_size, noop_flag, lr, beta1, beta2, epsilon: as of `multi_tensor_adam_capturable`.
        step, mode, bias_correction, weight_decay, inv_scale: the same.
        tensor_lists: [gradients, parameters, averages, averages of squares, masters]; the masters
            are stepped, and the parameters written from them.
    """
    grads, params, averages, squares, masters = columns_of(tensor_lists, 5)
    multi_tensor_adam_capturable(
        chunk_size,
        noop_flag,
        [grads, masters, averages, squares],
        lr,
        beta1,
        beta2,
        epsilon,
        step,
        mode,
        bias_correction,
        weight_decay,
        inv_scale,
    )
    for param, master in zip(params, masters, strict=True):
        is_set = noop_flag.reshape(()).to(param.device) == 1
        param.copy_(torch.where(is_set, param, master.to(param.dtype)))


def _options(
    lr: float | Tensor, beta1: float, beta2: float, epsilon: float, weight_decay: float
) -> dict[str, Any]:
    """Return the numbers by the names that torch's fused kernels know them by."""
    numbers = {"beta1": beta1, "beta2": beta2, "eps": epsilon, "weight_decay": weight_decay}
    return {"lr": lr, **numbers, "amsgrad": False, "maximize": False}


def _multiply_unless(noop_flag: Tensor, grads: list[Tensor], factor: Tensor) -> None:
    device = grads[0].device
    is_set = noop_flag.reshape(()).to(device) == 1
    used = torch.where(is_set, 1.0, factor.reshape(()).to(device))
    multiply(grads, used)


def _step(
    columns: list[list[Tensor]],
    mode: int,
    step: Tensor | float,
    bias_correction: int,
    options: dict[str, Any],
    noop_flag: Tensor | None = None,
) -> None:
    grads, params, averages, squares = columns
    device = params[0].device
    if not bias_correction:
        step = _FOREVER
    count = (
        step.to(device, torch.float32)
        if isinstance(step, Tensor)
        else torch.full((), float(step), device=device, dtype=torch.float32)
    )
    found_inf = None
    if noop_flag is not None:
        found_inf = (noop_flag.to(device) == 1).float().reshape(())
    kernel: Any = torch._fused_adamw_ if mode == 1 else torch._fused_adam_
    steps = [count.reshape(())] * len(params)
    kernel(params, grads, averages, squares, [], steps, **options, found_inf=found_inf)
