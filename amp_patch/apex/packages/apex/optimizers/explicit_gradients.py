"""Gradients that are handed to a step, as the optimizers of 2019 took them; knows no formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[dict[str, Any]]


@contextlib.contextmanager
def explicit_gradients(
    groups: Groups, grads: Any, scale: float | Tensor, output_params: Any
) -> Iterator[None]:
    """Let parameters have other gradients inside the block, and copy them elsewhere at its end.

    Args:
        groups: of the optimizer that steps inside.
        grads: a list of gradients for each group, or one list where there is one group, of any
            floating dtypes; None: those that the parameters have.
        scale: what gradients are divided by.
        output_params: like ``grads``, the tensors (half, say) that the parameters are copied to;
            None: none.
    """
    if grads is None and output_params is None and isinstance(scale, (int, float)) and scale == 1:
        yield
        return
    before = [[param.grad for param in group["params"]] for group in groups]
    for group, given, own in zip(groups, per_group(grads, groups), before, strict=True):
        for param, grad in zip(group["params"], own if given is None else given, strict=True):
            param.grad = None if grad is None else _divided(grad, scale).to(param.dtype)
    try:
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            for param, grad in zip(group["params"], own, strict=True):
                param.grad = grad
    for group, outputs in zip(groups, per_group(output_params, groups), strict=True):
        if outputs:
            targets = [output.detach() for output in outputs]
            torch._foreach_copy_(targets, [param.detach() for param in group["params"]])


def per_group(given: Any, groups: Groups) -> list[list[Any] | None]:
    """Return a list, or None, for each group of an optimizer.

    Raises:
        RuntimeError: not one for each.
    """
    if given is None:
        return [None] * len(groups)
    lists = list(given)
    if not lists or not isinstance(lists[0], (list, tuple)):
        lists = [lists]
    if len(lists) != len(groups):
        raise RuntimeError(
            f"step() takes a list for each of the optimizer's {len(groups)} groups; got "
            f"{len(lists)}; call optimizer.step(grads=[[...] for group in "
            "optimizer.param_groups], ...)."
        )
    return [list(one) for one in lists]


def group_norms(grad_norms: Iterable[Any] | None, groups: Groups) -> list[Any]:
    """Return the norm of each group's gradients, None where it was not given."""
    return [None] * len(groups) if grad_norms is None else list(grad_norms)


def _divided(grad: Tensor, scale: float | Tensor) -> Tensor:
    wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
    return wide / (scale.to(wide.device) if isinstance(scale, Tensor) else scale)
