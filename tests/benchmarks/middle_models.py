"""Models of 0.3 to 2 million parameters, which keep a CPU busy for some milliseconds a step.

The memory of weights, masters and moments counts for more here than the host does, as it does not
in `host_models`. Knows no mixed precision.
"""

from __future__ import annotations

import torch
from benchmarks.host_models import HostModel, in_dtype_of, regression
from torch import Tensor, nn
from torch.nn import functional as F


def linears() -> HostModel:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return regression(nn.Sequential(*layers), torch.randn(128, 512), torch.randn(128, 512))


class Autoencoder(nn.Module):
    """A variational autoencoder of images of 28 x 28: (N, 784) to the same, means, logs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(784, 256), nn.Linear(32, 256)
        self.mean, self.log_variance = nn.Linear(256, 32), nn.Linear(256, 32)
        self.image = nn.Linear(256, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encode(x).relu()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.image(self.decode(drawn).relu()), mean, log_variance


def autoencoder() -> HostModel:
    x = torch.rand(64, 784)

    def loss(model: nn.Module, images: Tensor = x) -> Tensor:
        logits, mean, log_variance = (output.float() for output in model(images))
        divergence = (mean * mean + log_variance.exp() - 1 - log_variance).mean()
        return F.binary_cross_entropy_with_logits(logits, x) + 0.5 * divergence

    return HostModel(Autoencoder(), loss, lambda half: loss(half, in_dtype_of(half, x)))


class Recommender(nn.Module):
    """Six tables of 20,000 rows, and three linears: (N, 6) ids to (N, 1) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 16) for _ in range(6))
        self.hidden, self.further = nn.Linear(96, 128), nn.Linear(128, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
        return self.out(self.further(self.hidden(torch.cat(rows, 1)).relu()).relu())


def recommender() -> HostModel:
    ids, clicks = torch.randint(20_000, (256, 6)), torch.rand(256, 1).round()

    def loss(model: nn.Module) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(ids).float(), clicks)

    return HostModel(Recommender(), loss, loss)


def convolutions() -> HostModel:
    layers: list[nn.Module] = []
    sizes = ((3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    for before, after, stride in sizes:
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return regression(model, torch.randn(16, 3, 32, 32), torch.randn(16, 10))


class Words(nn.Module):
    """Two LSTM layers between an embedding and logits: (N, T) ids to (N, T, 2000)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.recurrent = nn.LSTM(128, 128, 2, batch_first=True)
        self.out = nn.Linear(128, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.recurrent(self.embedding(ids))[0])


def words() -> HostModel:
    ids, following = torch.randint(2000, (16, 32)), torch.randint(2000, (16, 32))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(ids).float().flatten(0, 1), following.flatten())

    return HostModel(Words(), loss, loss)


MODELS = {
    "4 x (Linear 512 + ReLU)": linears,
    "a variational autoencoder": autoencoder,
    "a recommender, six tables": recommender,
    "6 convolutions, 32 to 128 channels": convolutions,
    "an LSTM over words": words,
}
