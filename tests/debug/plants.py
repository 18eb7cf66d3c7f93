"""Modules in which a value leaves float16's range, each in a way of its own, and runs of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from amp_patch.debug.cause import Cause

WIDTH = 8


class Large(nn.Module):
    """A linear layer whose product is beyond float16, and brought back after it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.proj.weight.data.fill_(30000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.abs() + 1.0) * 1e-6


class Exponential(nn.Module):
    """An exponential that float32 holds; in half at O1 by a rule of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.proj(x) * 0.0 + 20.0) * 1e-9


class Scores(nn.Module):
    """An attention without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x) + 300.0, self.k(x) + 300.0
        return torch.softmax(q @ k.transpose(0, 1), -1) @ x


class RootOfZero(nn.Module):
    """A square root at 0, whose backward divides by it, whatever the precision."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)
        return y + torch.sqrt((y * 0.0).square().sum(-1, keepdim=True))


class Looked(nn.Module):
    """An embedding with a row that float16 cannot hold doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.table.weight.data.fill_(60000.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.zeros(len(x), dtype=torch.long)).to(x.dtype)
        return x + (rows.half() + rows.half()).to(x.dtype) * 1e-6


class Overflowing(torch.autograd.Function):
    """A function of the user's own whose backward overflows."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * torch.inf


class OwnFunction(nn.Module):
    """Calls `Overflowing`."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Overflowing.apply(self.proj(x))


def around(plant: nn.Module, before: int = 1, after: int = 1) -> nn.Sequential:
    """Return a model with the plant in a block at position ``before``."""
    blocks = [_block(nn.Tanh()) for _ in range(before + 1 + after)]
    blocks[before] = _block(plant)
    return nn.Sequential(*blocks)


def _block(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), module)


def prepared(
    amp: ModuleType, model: nn.Module, level: str, **options: object
) -> tuple[nn.Module, Optimizer]:
    options = {"verbosity": 0, "trace_overflow": True, "loss_scale": 8.0, **options}
    return amp.initialize(model, SGD(model.parameters(), lr=0.01), opt_level=level, **options)


def the_cause(amp: Any) -> Cause:
    """The only one that was found."""
    ((cause, _),) = amp.overflow_report().causes
    return cause


def square(outputs: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), torch.zeros_like(outputs, dtype=torch.float32))


def train(
    amp: ModuleType,
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Tensor], Tensor] = square,
    steps: int = 1,
) -> None:
    for step in range(steps):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaled_backward(amp, loss_of(model(inputs)), optimizer)
        optimizer.step()
