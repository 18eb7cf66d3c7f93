"""What a script freezes in `optimizer.param_groups` does not learn, though masters stand there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

LEVELS = ("O2", "O5")
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Plain:
    """The calls of `amp` that a loop makes, without any precision but float32."""

    @staticmethod
    def scale_loss(loss: Tensor, optimizer: Optimizer) -> Any:
        return contextlib.nullcontext(loss)


def networks() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), nn.Linear(8, 1)]


def held(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class Toggled:
    """Freezes what the other optimizers hold, and gives back what it found, as Lightning does."""

    def __init__(self, others: list[Optimizer]) -> None:
        self.found = [(one, one.requires_grad) for other in others for one in held(other)]

    def __enter__(self) -> None:
        for one, _ in self.found:
            one.requires_grad = False

    def __exit__(self, *error: object) -> None:
        for one, learned in self.found:
            one.requires_grad = learned


def adversaries(amp: Any, models: list[nn.Linear], optimizers: list[Optimizer]) -> list[Tensor]:
    """Train two networks against each other, each clearing its own gradients after its step."""
    generator, judge = models
    for _ in range(6):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            with Toggled([one for one in optimizers if one is not optimizer]):
                loss = F.softplus(sign * judge(generator(X)).float()).mean()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [one.detach().float() for model in models for one in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"fused_step": True}])
@pytest.mark.parametrize("level", LEVELS)
def test_networks_that_learn_in_turn_learn_as_in_float32(
    amp: ModuleType, level: str, options: dict[str, Any]
) -> None:
    models = networks()
    models[0].bias.requires_grad_(False)  # stays so
    plain = copy.deepcopy(models)
    expected = adversaries(Plain, plain, [SGD(one.parameters(), lr=0.1) for one in plain])
    optimizers = [SGD(one.parameters(), lr=0.1) for one in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    found = adversaries(amp, models, optimizers)
    assert torch.equal(found[1], networks()[0].bias.to(models[0].bias.dtype))
    eps = torch.finfo(models[0].weight.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=2 * eps)


def prepared(amp: ModuleType, level: str) -> tuple[nn.Linear, Optimizer]:
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    return model, optimizer


FORWARDS: dict[str, Callable[[nn.Linear], Any]] = {
    "call": lambda model: model(X),
    "compiled": lambda model: torch.compile(model, backend="eager")(X),
    "after torch.func": lambda model: (torch.func.vmap(model)(X), model(X)),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_half_parameter_follows_at_the_next_forward(
    amp: ModuleType, level: str, name: str
) -> None:
    model, optimizer = prepared(amp, level)
    weight, bias = held(optimizer)
    weight.requires_grad = False
    FORWARDS[name](model)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)
    model(X).float().sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None
    weight.requires_grad_()
    FORWARDS[name](model)
    assert model.weight.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_masters_that_are_handed_out_say_what_learns(amp: ModuleType, level: str) -> None:
    """Before any forward what the script has set of a master counts, else the half parameter's."""
    model, optimizer = prepared(amp, level)
    next(held(optimizer)).requires_grad = False
    model.bias.requires_grad_(False)
    assert [one.requires_grad for one in amp.master_params(optimizer)] == [False, False]
    assert not model.weight.requires_grad
    model.weight.requires_grad_()
    model(X)
    assert [one.requires_grad for one in amp.master_params(optimizer)] == [True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_what_the_script_froze_itself_stays_frozen(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    model.weight.requires_grad_(False)
    with Toggled([optimizer]):
        model(X)
    model(X)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_ends_a_turn(amp: ModuleType, level: str) -> None:
    """The next turn may call a part of the model, past what sees calls of it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    first, second = (SGD(part.parameters(), lr=0.1) for part in model)
    amp.initialize(model, [first, second], opt_level=level, loss_scale=1.0, verbosity=0)
    with Toggled([second]):
        for _ in range(2):
            first.zero_grad()
            loss = model(X).sum()
            assert not any(param.requires_grad for param in model[1].parameters())
            loss.backward()
            first.step()
    with Toggled([first]):
        model[1](torch.ones(1, 8, dtype=model[1].weight.dtype)).sum().backward()
    assert all(param.grad is not None for param in model[1].parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_what_learns_again_does_so_without_amp(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    with Toggled([optimizer]):
        model(X)
    amp.deactivate()
    assert all(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_that_came_later_is_frozen_as_well(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    model(X)
    late = nn.Parameter(torch.ones(3, dtype=model.weight.dtype))
    optimizer.add_param_group({"params": [late]})
    with Toggled([optimizer]):
        model(X)
        assert not late.requires_grad
    model(X)
    assert late.requires_grad
