"""A first step with gradients of a loss that was not scaled: told of once, and of no other."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

LEVELS = ["O1", "O2", "O3"]
MESSAGE = "every loss is to be multiplied by it"


def prepared(amp: ModuleType, level: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"loss_scale": "dynamic", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 3)).float().square().mean()


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [one.filename for one in caught if MESSAGE in str(one.message)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("around", ["nothing", "an empty block"])
def test_a_backward_that_no_block_scales_is_told_of_once(
    amp: ModuleType, recwarn: pytest.WarningsRecorder, level: str, around: str
) -> None:
    model, optimizer = prepared(amp, level)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        if around == "an empty block":
            with amp.scale_loss(loss, optimizer):
                pass
        loss.backward()
        optimizer.step()
    assert told(recwarn.list) == [__file__]


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_of_a_closure(amp: ModuleType, recwarn: pytest.WarningsRecorder, level: str) -> None:
    model, optimizer = prepared(amp, level)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert told(recwarn.list) == [__file__]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["a scaled loss", "no gradients"])
def test_what_follows_a_scaled_loss_is_the_scripts(amp: ModuleType, level: str, first: str) -> None:
    """Warnings are errors here."""
    model, optimizer = prepared(amp, level)
    if first == "no gradients":
        optimizer.step()
    scaled_backward(amp, loss_of(model), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def test_a_scaled_loss_of_another_optimizer_of_the_same_parameters_counts(amp: ModuleType) -> None:
    model = nn.Linear(3, 2)
    optimizers = [SGD(model.parameters(), lr=0.1) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level="O1", verbosity=0)
    scaled_backward(amp, loss_of(model), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize(("level", "scale"), [("O1", 1.0), ("O5", None), ("O0", None)])
def test_where_there_is_no_scale_nothing_is_said(
    amp: ModuleType, level: str, scale: float | None
) -> None:
    model, optimizer = prepared(amp, level, loss_scale=scale)
    loss_of(model).backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_held", [False, True])
def test_a_group_that_joins_brings_gradients_of_a_scaled_loss(
    amp: ModuleType, recwarn: pytest.WarningsRecorder, level: str, is_held: bool
) -> None:
    """Of a block of another optimizer's, which held the group, or reached its layer."""
    models = [nn.Linear(3, 2) for _ in range(3)]
    groups = [{"params": list(model.parameters())} for model in models]
    first = SGD(groups[: 1 + is_held], lr=0.1)
    second = SGD(groups[2:], lr=0.1)
    amp.initialize(models, [first, second], opt_level=level, verbosity=0)
    scaled_backward(amp, loss_of(models[0]) + loss_of(models[1]), first)
    second.add_param_group(first.param_groups.pop() if is_held else groups[1])
    second.step()
    assert told(recwarn.list) == []
