"""The wrapper since October 2019, whose masters are copies of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optimizers.scaled_optimizer import ScaledOptimizer

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(ScaledOptimizer):
    """Steps a float32 master for each (half) parameter; see `ScaledOptimizer`.

    Attributes:
        fp32_groups: the masters, a list for each group.
    """

    masters_name = "fp32_groups"
    fp32_groups: list[list[Tensor]]

    def _put_masters(self, groups: list[dict[str, Any]]) -> list[list[Tensor]]:
        params = [list(group["params"]) for group in groups]
        self.fp32_groups = [[_copy(param) for param in group] for group in params]
        for group, masters in zip(groups, self.fp32_groups, strict=True):
            group["params"] = masters
        return params

    def _targets(self) -> list[list[Tensor]]:
        return self.fp16_groups

    def _gradients(self) -> list[list[Tensor | None]]:
        return [[param.grad for param in group] for group in self.fp16_groups]


def _copy(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, copy=True).requires_grad_(param.requires_grad)
