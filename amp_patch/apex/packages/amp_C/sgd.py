"""SGD over lists of tensors, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike, torch_optimizers

from .tensor_lists import Lists, columns_of, is_known_set, unless_set, widened, write_back


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Step by SGD, as `torch.optim.SGD` has it.

    Args:
        chunk_size: without effect.
        noop_flag: int32, shape (1,); nothing changes where it is not 0.
        tensor_lists: [gradients, parameters, momenta], of any floating dtypes, and on demand
            [..., half parameters], which parameters are copied to.
        wd: the share of the parameter that is added to the gradient.
        momentum, dampening, lr, nesterov: as of `torch.optim.SGD`.
        first_run: momenta hold nothing yet; they become the gradients.
        wd_after_momentum: decay is added to what is subtracted, not to what is averaged.
        scale: gradients are multiplied by it.
    """
    lists = columns_of(tensor_lists, 3, 4)
    if is_known_set(noop_flag):
        return
    options = {"lr": float(lr), "momentum": momentum, "dampening": dampening}
    with unless_set(noop_flag, *lists[1:]):
        for columns in alike(*lists):
            wide = widened(columns[:3])
            grads, params, momenta = wide
            if scale != 1:
                grads = list(torch._foreach_mul(grads, float(scale)))
            if wd_after_momentum:
                torch._foreach_mul_(params, 1 - float(lr) * wd)
            buffers: list[Tensor | None] = [None] * len(momenta) if first_run else [*momenta]
            decay = 0.0 if wd_after_momentum else wd
            torch_optimizers.sgd(
                params,
                grads,
                buffers,
                weight_decay=decay,
                nesterov=bool(nesterov),
                maximize=False,
                **options,
            )
            if momentum != 0 and first_run:
                torch._foreach_copy_(momenta, [b for b in buffers if b is not None])
            write_back(columns[1:3], wide[1:])
            for models in columns[3:]:
                torch._foreach_copy_(models, params)
