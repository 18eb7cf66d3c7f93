"""The backwards of one optimizer at O1, made by hand."""

import torch
from torch.optim import Optimizer

from amp_patch.step.held_params import HeldParams
from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.skip import Skip


def backward_of(optimizer: Optimizer) -> OptimizerBackward:
    held = HeldParams(optimizer, masters=None)
    return OptimizerBackward(optimizer, held, fused=None, skip=Skip(print))


def make_pass(
    backward: OptimizerBackward, optimizer: Optimizer, gradient: float, scale: float
) -> None:
    """Begin a pass, and write what its backward would."""
    pairs = backward.pairs()
    backward.begin(pairs, scale)
    for param in pairs.model:
        scaled = torch.full_like(param, gradient * scale)
        param.grad = scaled if param.grad is None else param.grad + scaled


def gradients(optimizer: Optimizer) -> list[list[float] | None]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [None if param.grad is None else param.grad.tolist() for param in params]
