"""A layer whose weights need more than half precision, trained by a scaled loss."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

#: Not representable in fp16 or bf16, nor close to it.
FINE = 2.0**-18


def fine_linear(inputs: int = 4, outputs: int = 3) -> nn.Linear:
    """Return a layer whose weights need more than half precision."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randint(-64, 64, param.shape) / 64 + FINE)
    return layer


def prepared(
    amp: ModuleType,
    level: str = "O2",
    model: nn.Module | None = None,
    make: Callable[..., Optimizer] = SGD,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    model = fine_linear() if model is None else model
    optimizer = make(model.parameters(), lr=0.125)
    options = {"loss_scale": 64.0, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def backward(amp: ModuleType, model: nn.Module, optimizer: Any, *inputs: Tensor) -> None:
    given = inputs or (torch.ones(2, 4),)
    scaled_backward(amp, model(*given).sum(), optimizer)


def train_step(amp: ModuleType, model: nn.Module, optimizer: Any, *inputs: Tensor) -> None:
    optimizer.zero_grad()
    backward(amp, model, optimizer, *inputs)
    optimizer.step()


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype is expected[name].dtype
        assert torch.equal(actual[name], expected[name]), name
