"""An optimizer that amp_patch has never seen, and what its one file would hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.optimizers.groups import GroupUpdate, StepInputs


class SignSGD(Optimizer):
    """Steps by the sign of an average of the gradients (Bernstein et al. 2018)."""

    def __init__(self, params: Any, lr: float = 0.125, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(group["beta"]).add_(param.grad, alpha=1 - group["beta"])
                    param.add_(average.sign(), alpha=-group["lr"])
        return loss


class SignSgdUpdate(GroupUpdate):
    numbers = ("beta",)
    steps = 0

    def step(self, inputs: StepInputs) -> None:
        type(self).steps += 1
        _, group, params, grads, states, *_ = inputs
        averages: list[Tensor] = [
            state.setdefault("average", torch.zeros_like(param))
            for param, state in zip(params, states, strict=True)
        ]
        torch._foreach_mul_(averages, group["beta"])
        torch._foreach_add_(averages, grads, alpha=1 - group["beta"])
        torch._foreach_add_(params, torch._foreach_sign(averages), alpha=-group["lr"])
