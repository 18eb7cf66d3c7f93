"""Half parameters at O1, by ``allow_incoming_model_not_fp32``: two losses before one step."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn

import amp_patch.amp

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def amp(apex: types.ModuleType):
    yield apex.amp
    amp_patch.amp.deactivate()


def prepared(amp: Any) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    models = [nn.Linear(2, 1, bias=False).half() for _ in range(2)]
    for model in models:
        nn.init.constant_(model.weight, 1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    options = {"opt_level": "O1", "num_losses": 2, "verbosity": 0, "max_loss_scale": 16.0}
    amp.initialize(models, optimizers, **options)
    return models, optimizers


def losses(
    models: list[nn.Module], first: float, second: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one loss of the first model, and one of both, with gradients of these sizes."""
    ones = torch.ones(1, 2)
    return models[0](ones).sum() * first, sum(model(ones).sum() for model in models) * second


def step(amp: Any, models: Any, optimizers: Any, first: float, second: float) -> list[bool]:
    """Return which of the two optimizers changed its weights."""
    before = [model.weight.detach().clone() for model in models]
    one, both = losses(models, first, second)
    scaled_backward(amp, one, optimizers[0], loss_id=0)
    scaled_backward(amp, both, optimizers, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return [not torch.equal(model.weight, old) for model, old in zip(models, before, strict=True)]


@pytest.mark.parametrize("overflow", [INF, NAN])
def test_an_overflow_of_an_earlier_loss_is_none_of_the_next_one(amp, overflow: float) -> None:
    models, optimizers = prepared(amp)
    assert step(amp, models, optimizers, overflow, 1.0) == [False, True]
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [8.0, 16.0]
    assert step(amp, models, optimizers, 1.0, 1.0) == [True, True]


@pytest.mark.parametrize("overflow", [INF, NAN])
def test_an_overflow_of_the_later_loss_skips_both(amp, overflow: float) -> None:
    models, optimizers = prepared(amp)
    assert step(amp, models, optimizers, 1.0, overflow) == [False, False]
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [16.0, 8.0]


def test_a_sum_that_overflows_where_both_parts_are_finite_skips(amp) -> None:
    models, optimizers = prepared(amp)
    large = 40000.0  # unscaled; two of them are above 65504
    amp._amp_state.loss_scalers[0]._loss_scale = amp._amp_state.loss_scalers[1]._loss_scale = 1.0
    assert step(amp, models, optimizers, large, large) == [False, False]


def test_one_element_that_overflowed_before_hides_no_sum_of_another(amp) -> None:
    models, optimizers = prepared(amp)
    amp._amp_state.loss_scalers[0]._loss_scale = amp._amp_state.loss_scalers[1]._loss_scale = 1.0
    with amp.scale_loss(models[0](torch.tensor([[INF, 40000.0]])).sum(), optimizers[0]) as scaled:
        scaled.backward()
    loss = models[0](torch.full((1, 2), 40000.0)).sum()
    with amp.scale_loss(loss, optimizers[0], loss_id=1) as scaled_loss:
        scaled_loss.backward()
    assert amp._amp_state.loss_scalers[1]._loss_scale == 0.5
