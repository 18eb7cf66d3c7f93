"""Small models whose training steps are bound by the host; knows no mixed precision.

Each is measured at a size at which the device has next to nothing to do. ``loss`` is a user's:
the same line in fp32, under autocast and with amp_patch. ``bare_loss`` is what one writes by hand
for a model stored in half precision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HostModel(NamedTuple):
    """A model and its loss on one fixed batch.

    Attributes:
        model: in fp32, in training mode.
        loss: returns the loss of a forward of the model it is given, a scalar.
        bare_loss: the same of the model in half precision, its fp32 loss.
    """

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    bare_loss: Callable[[nn.Module], Tensor]


def regression(model: nn.Module, x: Tensor, y: Tensor) -> HostModel:
    """Return a model with the mean squared error of its output for ``x`` against ``y``."""

    def bare_loss(half: nn.Module) -> Tensor:
        return F.mse_loss(half(in_dtype_of(half, x)).float(), y)

    return HostModel(model, lambda model: F.mse_loss(model(x), y), bare_loss)


def in_dtype_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return an input in the dtype of a model's first weight."""
    return x.to(next(model.parameters()).dtype)


def linears() -> HostModel:
    layers = [layer for _ in range(24) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return regression(nn.Sequential(*layers), torch.randn(4, 8), torch.randn(4, 8))


class Block(nn.Module):
    """A transformer's layer, its query, key and value apart: (N, T, width)."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attend(self.norm1(hidden))
        return hidden + self.narrow(F.gelu(self.widen(self.norm2(hidden))))

    def attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


def transformer() -> HostModel:
    model = nn.Sequential(*(Block() for _ in range(12)))
    return regression(model, torch.randn(2, 4, 16), torch.randn(2, 4, 16))


def convolutions() -> HostModel:
    layers: list[nn.Module] = []
    for channels in (3, *[8] * 16):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return regression(model, torch.randn(2, 3, 6, 6), torch.randn(2, 4))


def hugging_face_bert() -> HostModel:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    tokens = torch.arange(16).view(2, 8)

    def loss(model: nn.Module) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return HostModel(BertForMaskedLM(config), loss, lambda model: loss(model).float())


def gradient_penalty() -> HostModel:
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    points = torch.randn(4, 8)

    def penalized(scores: Tensor, x: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + (slopes.norm(2, dim=1) - 1).square().mean()

    def loss(model: nn.Module) -> Tensor:
        x = points.clone().requires_grad_()
        return penalized(model(x), x)

    def bare_loss(half: nn.Module) -> Tensor:
        x = points.clone().requires_grad_()
        return penalized(half(in_dtype_of(half, x)).float(), x)

    return HostModel(model, loss, bare_loss)


class Concatenated(nn.Module):
    """A linear layer whose weights are ``count`` parameters: (N, 4 * count) to (N,)."""

    def __init__(self, count: int = 1000) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(4) / 8 for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.cat(list(self.parts))).sum(1)


def many_parameters() -> HostModel:
    return regression(Concatenated(), torch.randn(2, 4000), torch.randn(2))


class GraphConvolutions(nn.Module):
    """Six layers that add up their neighbours' features: (10, width) to the same."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.register_buffer("source", torch.arange(20) % 10)
        self.register_buffer("target", torch.arange(20) * 7 % 10)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            sent = layer(features)[self.source]
            features = torch.zeros_like(features, dtype=sent.dtype).index_add(0, self.target, sent)
            features = F.relu(features)
        return features


def graph_convolutions() -> HostModel:
    return regression(GraphConvolutions(), torch.randn(10, 8), torch.randn(10, 8))


class Recurrent(nn.Module):
    """An LSTM cell that is called for each step: (T, N, width) to the same."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(width, width), nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        state = None
        outputs = []
        for x in sequence:
            state = self.cell(x, state)
            outputs.append(self.out(state[0]))
        return torch.stack(outputs)


def recurrent() -> HostModel:
    return regression(Recurrent(), torch.randn(6, 4, 8), torch.randn(6, 4, 8))


MODELS = {
    "24 x (Linear 8 + ReLU)": linears,
    "12 transformer blocks, width 16": transformer,
    "17 convolutions with batch norm": convolutions,
    "Hugging Face's BERT, 8 layers": hugging_face_bert,
    "gradient penalty, 9 linears": gradient_penalty,
    "1,000 parameters of 4 elements": many_parameters,
    "6 graph convolutions, width 8": graph_convolutions,
    "LSTM cell, called 6 times": recurrent,
}
if importlib.util.find_spec("transformers") is None:
    del MODELS["Hugging Face's BERT, 8 layers"]
