"""A model with one optimizer, its backwards of all kinds, and the same in float32."""

import copy

import torch
from torch import nn

X = torch.linspace(-1, 1, 12).reshape(4, 3)
WITH_MASTERS = ("O2", "O5")


def start(amp, opt_level, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **options)


def backward(model):
    model(X).float().square().mean().backward()


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def with_penalty(loss, weights):
    return loss + 0.1 * sum(weight.float().square().sum() for weight in weights)


def stepped_by(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def backward_of(kind, model, optimizer, masters, scaled=None):
    """Call a backward of a loss of data, of the stepped weights, or of both."""
    loss = model(X).float().square().mean() if kind != "penalty" else 0.0
    if kind not in ("data", "block"):
        weights = stepped_by(optimizer) if kind == "of groups" else masters(optimizer)
        loss = with_penalty(loss, weights)
    if scaled is None or not kind.startswith("block"):
        loss.backward()
    else:
        with scaled(loss, optimizer) as scaled_loss:
            scaled_loss.backward()


def float32_twin(amp, model, optimizer):
    """Return a float32 copy of the model as its masters are, and what steps it."""
    plain = copy.deepcopy(model).float()
    for mine, twin in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        twin.data.copy_(mine.data)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.5)
