"""Small models with data to train them on, one of each family; all losses start near 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

CLASSES = 4


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs, _ = self.lstm(sequences)
        return self.head(outputs[:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16),
        nn.Tanh(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def normed_pair(kind: type[Optimizer] = SGD, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Return a model with a batch norm, of 4 features, and its optimizer; the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return model, kind(model.parameters(), **{"lr": 0.1, **options})


@dataclass(frozen=True)
class Task:
    """How to build a model and a batch for it.

    Attributes:
        watched: name of a linear layer or convolution.
        norm: name of a batch norm, if there is one.
        lr: learning rate for SGD.
    """

    build: Callable[[], nn.Module]
    watched: str
    norm: str | None
    lr: float
    inputs: Callable[[], Tensor]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return 64 inputs and targets that follow from them."""
        generator = torch.Generator().manual_seed(1)
        inputs = self.inputs()
        features = inputs.float().flatten(1)
        features = (features - features.mean(0)) / features.std()
        weight = torch.randn(features.shape[1], CLASSES, generator=generator)
        return inputs, (features @ weight).argmax(1)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


TASKS = {
    "mlp": Task(mlp, "3", "1", 0.03, lambda: _noise(64, 6)),
    "cnn": Task(cnn, "4", "1", 0.12, lambda: _noise(64, 1, 8, 8)),
    "lstm": Task(Recurrent, "head", None, 0.7, lambda: _noise(64, 5, 6)),
    "transformer": Task(
        Transformer,
        "layer.linear1",
        None,
        0.15,
        lambda: torch.randint(12, (64, 6), generator=torch.Generator().manual_seed(2)),
    ),
}

OPTIMIZERS: dict[str, Callable[[nn.Module, Task], Optimizer]] = {
    "sgd": lambda model, task: SGD(model.parameters(), lr=task.lr, momentum=0.9),
    # An epsilon that float16 can hold: O3 keeps Adam's state in it.
    "adam": lambda model, task: Adam(model.parameters(), lr=1e-2, eps=1e-4),
    "fused_adamw": lambda model, task: AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True),
}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)
