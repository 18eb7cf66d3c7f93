"""The wrapper of December 2018 to October 2019, whose masters are one flat tensor per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .scaled_optimizer import ScaledOptimizer

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(ScaledOptimizer):
    """Steps one flat float32 master for each group of (half) parameters; see `ScaledOptimizer`.

    From now on the parameters are views of ``fp16_groups_flat``, and the groups of the optimizer
    hold one parameter, the master. One without a gradient counts as one whose gradient is 0, where
    others of its group have gradients. Frozen parameters are left out.

    Attributes:
        fp16_groups_flat: the parameters of each group in one tensor.
        fp32_groups_flat: their masters, in the same order.

    Raises:
        TypeError: parameters of several dtypes in one group; nothing has changed.
    """

    masters_name = "fp32_groups_flat"
    fp16_groups_flat: list[Tensor]
    fp32_groups_flat: list[Tensor]

    def _put_masters(self, groups: list[dict[str, Any]]) -> list[list[Tensor]]:
        stepped = [[p for p in group["params"] if p.requires_grad] for group in groups]
        for params in stepped:
            _refuse_several_dtypes(params)
        self.fp16_groups_flat, self.fp32_groups_flat = [], []
        for group, params in zip(groups, stepped, strict=True):
            flat = _flat([param.detach() for param in params])
            _become_views(params, flat)
            self.fp16_groups_flat.append(flat)
            self.fp32_groups_flat.append(flat.to(torch.float32, copy=True).requires_grad_())
            group["params"] = [self.fp32_groups_flat[-1]]
        return stepped

    def _targets(self) -> list[list[Tensor]]:
        # Whoever gave parameters other data since, by model.cuda() say, wrote past the flat one.
        for params, flat in zip(self.fp16_groups, self.fp16_groups_flat, strict=True):
            _become_views(params, flat)
        return [[flat] for flat in self.fp16_groups_flat]

    def _gradients(self) -> list[list[Tensor | None]]:
        return [[_flat_gradient(params)] for params in self.fp16_groups]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=torch.float32)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _become_views(params: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([param.numel() for param in params]) if params else ()
    for param, part in zip(params, parts, strict=True):
        param.data = part.view_as(param)


def _flat_gradient(params: Sequence[Tensor]) -> Tensor | None:
    if all(param.grad is None for param in params):
        return None
    return _flat([torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in params])


def _refuse_several_dtypes(params: Sequence[Tensor]) -> None:
    dtypes = sorted({str(param.dtype) for param in params})
    if len(dtypes) > 1:
        raise TypeError(
            "a group of apex.optimizers.FP16_Optimizer must have parameters of one dtype, for "
            f"they are views of one tensor; got {', '.join(dtypes)}. Give the optimizer a group "
            "for each, or call apex.contrib.optimizers.FP16_Optimizer or amp.initialize(model, "
            "optimizer, opt_level='O2')."
        )
