"""Weights that a layer's first batch turns to half at O1 and O4 train in float32."""

import warnings
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn


class ActNorm(nn.Module):
    """Finds its first scale from its first batch, as libraries of normalizing flows do."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(features))
        self.is_found = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_found:
            self.scale.data = -x.std(0).log().to(x.dtype).data
            self.is_found = True
        return x * self.scale.exp()


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_small_steps_of_weights_that_turned_to_half_are_not_lost(
    amp: ModuleType, level: str, with_closure: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), ActNorm(4))
    inputs, lr = torch.randn(64, 8), 2e-5
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scale = model[1].scale

    def backward() -> Tensor:
        optimizer.zero_grad()
        # each step of Adam goes down by its learning rate, for the gradient has one sign
        loss = 0.125 * scale.sum() + 0.0 * model(inputs).float().mean()
        scaled_backward(amp, loss, optimizer)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs)
        assert scale.dtype is not torch.float32
        first = scale.detach().double()
        for _ in range(40):
            if with_closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
    assert scale.dtype is torch.float32
    assert scale.grad is not None
    assert scale.grad.dtype is torch.float32
    torch.testing.assert_close(scale.detach().double(), first - 40 * lr, rtol=0, atol=2e-6)
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_frozen_weights_that_turned_to_half_stay_so(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), ActNorm(4))
    model[1].scale.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaled_backward(amp, model(torch.randn(64, 8)).float().square().mean(), optimizer)
    optimizer.step()
    assert model[1].scale.dtype is not torch.float32
