"""SGD over lists of tensors, computed in float32 and subtracted in the parameters' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.kernels import alike
from amp_patch.levels import HALVES

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

    In float32, but for the last operation: ``lr * update`` is rounded to the parameters' dtype and
    subtracted in it. With powers of two as options, half parameters and half momenta so get the
    very bits that `torch.optim.SGD` gives them.

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
    rule = (wd, momentum, dampening, nesterov, first_run, wd_after_momentum)
    with unless_set(noop_flag, *lists[1:]):
        for columns in alike(*lists):
            wide = widened(columns[:3])
            grads, params, momenta = wide
            if scale != 1:
                grads = list(torch._foreach_mul(grads, float(scale)))
            _subtract(columns[1], params, _updates(grads, params, momenta, *rule), float(lr))
            if momentum != 0:
                write_back([columns[2]], [momenta])
            for models in columns[3:]:
                torch._foreach_copy_(models, columns[1])


def _updates(
    grads: list[Tensor],
    params: list[Tensor],
    momenta: list[Tensor],
    wd: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
) -> list[Tensor]:
    """Return what is to be subtracted ``lr`` times; the momenta are moved in place."""
    if wd != 0 and not wd_after_momentum:
        grads = _sums(grads, params, wd)
    if momentum != 0:
        if first_run:
            torch._foreach_copy_(momenta, grads)
        else:
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, grads, alpha=1 - dampening)
        grads = _sums(grads, momenta, momentum) if nesterov else momenta
    return _sums(grads, params, wd) if wd != 0 and wd_after_momentum else grads


def _sums(tensors: list[Tensor], others: list[Tensor], factor: float) -> list[Tensor]:
    return list(torch._foreach_add(tensors, others, alpha=factor))


def _subtract(params: list[Tensor], wide: list[Tensor], updates: list[Tensor], lr: float) -> None:
    """Subtract ``lr * updates``: from half parameters rounded to half first, as apex does."""
    if params[0].dtype in HALVES:
        steps = torch._foreach_mul(updates, -lr)
        torch._foreach_add_(params, [step.to(params[0].dtype) for step in steps])
    else:
        torch._foreach_add_(wide, updates, alpha=-lr)
        write_back([params], [wide])
