"""A linear layer in training, and all that a step of it changes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

EPS = 1e-3  # the default is 0 in fp16, in which O3 steps
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "adam fused": lambda params: Adam(params, lr=0.125, eps=EPS, fused=True),
    "adam foreach": lambda params: Adam(params, lr=0.125, eps=EPS, foreach=True),
    "adam loop": lambda params: Adam(params, lr=0.125, eps=EPS, foreach=False),
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def prepared(
    amp: ModuleType, level: str = "O2", make: Callable[..., Optimizer] | None = None, **options: Any
) -> tuple[nn.Module, Optimizer]:
    model = linear()
    optimizer = (make or OPTIMIZERS["sgd"])(model.parameters())
    return amp.initialize(
        model, optimizer, opt_level=level, **{"loss_scale": 16.0, "verbosity": 0, **options}
    )


def backward(
    amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0, seed: int = 0
) -> None:
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    loss = model(inputs).float().square().mean() * factor
    scaled_backward(amp, loss, optimizer)


def train_step(
    amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0, seed: int = 0
) -> None:
    optimizer.zero_grad()
    backward(amp, model, optimizer, factor, seed)
    optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all that a step changes."""
    tensors = [*model.parameters(), *model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def assert_unchanged(model: nn.Module, optimizer: Optimizer, before: list[Tensor]) -> None:
    after = everything(model, optimizer)
    assert len(after) == len(before)
    for new, old in zip(after, before, strict=True):
        assert new.dtype is old.dtype
        assert torch.equal(new, old)
