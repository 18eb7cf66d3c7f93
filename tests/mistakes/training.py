"""A small training, made rightly: what each mistake is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import amp as core

LEVELS = ("O1", "O2", "O5")
STEPS = 4


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Choosy(nn.Module):
    """Asks for the dtype of what its head returns, or of its targets, as libraries do.

    Here, for pytest would write a message for a bare assertion of a module of tests.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Any, size: int = 4) -> Tensor:
        boxes = self.head(x) if "head" in self.kind else targets[0]["boxes"]
        if self.kind.startswith("type") and boxes.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"boxes must be of float type, instead got {boxes.dtype}")
        if self.kind.startswith("bare"):
            assert boxes.dtype == torch.float32
        if self.kind.startswith("said"):
            assert boxes.dtype == torch.float32, f"got {boxes.dtype}"
        if self.kind == "rank":
            assert boxes.dim() == 3, f"one for each image is needed; got {boxes}"
        if self.kind == "keyword":
            self.head(x, half=True)
        return boxes


def make(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = Net()
    return model, kind(model.parameters(), lr=0.05)


def prepared(amp: ModuleType, level: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return these as ``amp.initialize`` leaves them."""
    return amp.initialize(*make(), **{"opt_level": level, "verbosity": 0, **options})


def batches() -> Iterator[Tensor]:
    """Yield the inputs of each step."""
    for step in range(STEPS):
        yield torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the loss of a batch; small enough for float16 gradients to need the scale."""
    return model(inputs).float().square().mean()


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of the fp32 values of the weights."""
    return [value.clone() for value in model.state_dict().values()]


Clip = Callable[[nn.Module, Any], Any]


@functools.cache
def trained_rightly(level: str, clip: Clip | None = None) -> list[Tensor]:
    """Return the weights after the training with ``scale_loss``.

    Args:
        level: opt_level.
        clip: called with the model and the optimizer between backward and step.
    """
    model, optimizer = prepared(core, level)
    for inputs in batches():
        optimizer.zero_grad()
        with core.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
    trained = weights(model)
    core.deactivate()
    return trained


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    """Assert that weights are equal, bit for bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
