"""LAMB as its paper has it, in float64: the reference for ours."""

from typing import Any

import torch
from torch import Tensor


class Lamb:
    """The rule, with apex's options, in float64 and one tensor at a time."""

    def __init__(self, params: list[Tensor], max_grad_norm: float | None, **options: Any) -> None:
        self.params = [param.detach().double().clone() for param in params]
        self.averages = [torch.zeros_like(param) for param in self.params]
        self.squares = [torch.zeros_like(param) for param in self.params]
        self.steps = [0] * len(params)
        self.max_grad_norm, self.options = max_grad_norm, options

    def step(self, grads: list[Tensor | None]) -> None:
        exact = [None if grad is None else grad.double() for grad in grads]
        norm = sum(g.square().sum().item() for g in exact if g is not None) ** 0.5
        limit = self.max_grad_norm
        factor = limit / norm if limit and norm > limit else 1.0
        for i, grad in enumerate(exact):
            if grad is not None:
                self.step_one(i, grad * factor)

    def step_one(self, i: int, grad: Tensor) -> None:
        options, param = self.options, self.params[i]
        (beta1, beta2), decay = options["betas"], options["weight_decay"]
        self.steps[i] += 1
        if not options["adam_w_mode"]:
            grad = grad + decay * param
        share = 1 - beta1 if options["grad_averaging"] else 1.0
        self.averages[i] = beta1 * self.averages[i] + share * grad
        self.squares[i] = beta2 * self.squares[i] + (1 - beta2) * grad**2
        average, square = self.averages[i], self.squares[i]
        if options["bias_correction"]:
            average = average / (1 - beta1 ** self.steps[i])
            square = square / (1 - beta2 ** self.steps[i])
        update = average / (square.sqrt() + options["eps"])
        if options["adam_w_mode"]:
            update = update + decay * param
        ratio = 1.0
        if decay or options["use_nvlamb"]:
            norms = param.square().sum().sqrt().item(), update.square().sum().sqrt().item()
            ratio = 1.0 if 0.0 in norms else norms[0] / norms[1]
        self.params[i] = param - options["lr"] * ratio * update
