"""LAMB over lists of tensors, computed in float32: in one call, and in the two of old."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike, torch_optimizers

from .tensor_lists import Lists, columns_of, like, widened, write_back


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float | None,
    use_nvlamb: bool | None = None,
) -> None:
    """Step by LAMB (You et al. 2020, arXiv:1904.00962).

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex: what is not finite goes into the parameters.
        tensor_lists: [gradients, parameters, averages, averages of squares], of any floating
            dtypes; all but the gradients are changed in place. (apex left its updates in the
            gradients.)
        lr, beta1, beta2, epsilon, weight_decay: the numbers of the formula.
        step: of this step, from 1.
        bias_correction: whether the averages are divided by ``1 - beta ** step``.
        grad_averaging: whether the gradient enters its average by ``1 - beta1``, or by 1.
        mode: 0: decay is added to the gradient (L2); 1: to the update.
        global_grad_norm: of all gradients there are, one element.
        max_grad_norm: gradients are multiplied so that that is at most this; None or 0: not.
        use_nvlamb: scale by the ratio of the norms also without weight decay.
    """
    for columns in alike(*columns_of(tensor_lists, 4)):
        wide = widened(columns)
        grads, params, averages, squares = wide
        torch_optimizers.lamb(
            params,
            _clipped(grads, global_grad_norm, max_grad_norm),
            averages,
            squares,
            [float(step)],
            lr=float(lr),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=weight_decay,
            decoupled=mode == 1,
            bias_correction=bool(bias_correction),
            grad_averaging=bool(grad_averaging),
            adapt_always=bool(use_nvlamb),
        )
        write_back(columns[1:], wide[1:])


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """As `multi_tensor_lamb`, with what changes between steps in tensors; waits for their device.

    Args:
        chunk_size: without effect.
        noop_flag: int32, shape (1,); nothing changes where it is not 0.
        tensor_lists: as of `multi_tensor_lamb`, and on demand [..., half parameters], which
            parameters are copied to.
        lr, step, global_grad_norm, max_grad_norm: one element each. The norms are those of the
            gradients before ``inv_scale``.
        beta1, beta2, epsilon, bias_correction, weight_decay, grad_averaging, mode, use_nvlamb: as
            of `multi_tensor_lamb`.
        found_inf: one element; nothing changes where it is not 0.
        inv_scale: float32, one element, by which gradients are multiplied first.
    """
    grads, params, *others = columns_of(tensor_lists, 4, 5)
    if int(noop_flag) != 0 or float(found_inf) != 0:
        return
    (wide,) = widened([grads])
    factor = float(inv_scale)
    if factor != 1:
        wide = list(torch._foreach_mul(wide, factor))
    multi_tensor_lamb(
        chunk_size,
        noop_flag,
        [wide, params, *others[:2]],
        float(lr),
        beta1,
        beta2,
        epsilon,
        int(step),
        bias_correction,
        weight_decay,
        grad_averaging,
        mode,
        global_grad_norm * factor,
        float(max_grad_norm) * factor,
        use_nvlamb,
    )
    for models in others[2:]:
        torch._foreach_copy_(models, params)


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor | float,
    max_global_grad_norm: float,
) -> None:
    """Write the update of LAMB, before it is scaled by the ratio of the norms.

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex.
        tensor_lists: [gradients, parameters, averages, averages of squares, updates], of any
            floating dtypes; the last three are written to.
        per_tensor_decay: shape (number of tensors,), the weight decay of each.
        step: of this step, from 0.
        beta1, beta2, epsilon: the numbers of the formula.
        global_grad_norm: of all gradients there are, one element.
        max_global_grad_norm: gradients are multiplied so that that is at most this.
    """
    lists = columns_of(tensor_lists, 5)
    norm = torch.as_tensor(global_grad_norm)
    for *columns, decays in alike(*lists, per_tensor_decay.unbind()):
        wide = widened(columns)
        grads, params, averages, squares, updates = wide
        grads = _clipped(grads, norm, max_global_grad_norm)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_div(squares, 1 - beta2 ** (step + 1))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, epsilon)
        torch._foreach_copy_(updates, averages)
        torch._foreach_div_(updates, 1 - beta1 ** (step + 1))
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, torch._foreach_mul(params, like(params, decays)))
        write_back(columns[2:], wide[2:])


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float | None = None,
    use_nvlamb: bool | None = None,
) -> None:
    """Subtract updates, scaled by ``lr`` and by the ratio of the norms of parameter and update.

    Args:
        chunk_size: without effect.
        noop_flag: without effect, as in apex.
        tensor_lists: [parameters, updates], of any floating dtypes; the former are changed.
        per_tensor_param_norm, per_tensor_update_norm: shape (number of tensors,); the ratio is 1
            where either is 0.
        lr: learning rate.
        weight_decay: where it is 0 the ratio is 1, without ``use_nvlamb``. Early versions of apex
            did not take it, and always used the ratio.
        use_nvlamb: use the ratio also without weight decay.
    """
    lists = columns_of(tensor_lists, 2)
    ours, theirs = per_tensor_param_norm, per_tensor_update_norm.to(per_tensor_param_norm.device)
    ratios = torch.where((ours == 0) | (theirs == 0), 1.0, ours / theirs)
    if weight_decay == 0 and not use_nvlamb:
        ratios = torch.ones_like(ratios)
    for params, updates, factors in alike(*lists, ratios.unbind()):
        wide_params, wide_updates = wide = widened([params, updates])
        scaled = torch._foreach_mul(wide_updates, like(wide_updates, factors))
        torch._foreach_add_(wide_params, scaled, alpha=-float(lr))
        write_back([params], wide[:1])


def _clipped(grads: list[Tensor], norm: Tensor, max_norm: float | None) -> list[Tensor]:
    if not max_norm:
        return grads
    (total,) = like(grads, [norm.reshape(())])
    factor = (max_norm / total).clamp(max=1.0)
    return list(torch._foreach_mul(grads, factor))
