"""Gradients that a script gives after its blocks; a step is skipped where they are not finite."""

import functools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD

from amp_patch.step.given_gradients import skip_nonfinite
from amp_patch.step.held_params import HeldParams
from amp_patch.step.skip import Skip


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def skip(said: list[str]) -> Skip:
    return Skip(said.append)


def held_with(*gradients: float | None) -> HeldParams:
    """Return parameters with these gradients; what holds them keeps their optimizer alive."""
    params = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else torch.full_like(param, gradient)
    optimizer = SGD(params, lr=1.0)
    held = HeldParams(optimizer, masters=None)
    held.pairs()
    held.owner = optimizer  # type: ignore[attr-defined]
    return held


def clear_overflow(skip: Skip) -> None:
    skip.ask("an overflow")
    skip.forget_cleared()


@pytest.mark.parametrize("gradient", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("are_shared", [True, False])
def test_what_is_not_finite_skips_the_step(
    skip: Skip, said: list[str], gradient: float, are_shared: bool
) -> None:
    if not are_shared:
        clear_overflow(skip)
    skip_nonfinite(skip, held_with(1.0, gradient), are_shared)
    assert skip.is_certain
    skip.note_skipped()
    (line,) = said
    assert ("gradients that ranks share" in line) is are_shared
    assert ("gradients were put back" in line) is not are_shared


@pytest.mark.parametrize("gradients", [(1.0, -1.0), (1.0, None), (None,)])
def test_finite_gradients_or_none_skip_nothing(skip: Skip, gradients: tuple[float | None]) -> None:
    clear_overflow(skip)
    skip_nonfinite(skip, held_with(*gradients), are_shared=True)
    assert not skip.is_certain


def test_where_none_may_be_given_nothing_is_looked_at(skip: Skip) -> None:
    skip_nonfinite(skip, held_with(math.inf), are_shared=False)
    assert not skip.is_certain


def test_a_known_overflow_is_what_the_line_is_about(skip: Skip, said: list[str]) -> None:
    skip.ask("an overflow")
    skip_nonfinite(skip, held_with(math.inf), are_shared=True)
    skip.note_skipped()
    assert said == ["an overflow"]


def given_inf(amp: ModuleType | None, level: str = "") -> list[torch.Tensor]:
    """Give one of two gradients inf after they were unscaled, and step; return the weights."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    inputs = torch.linspace(-1, 1, 12).reshape(4, 3)
    if amp is None:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)
        step: Any = functools.partial(scaler.step, optimizer)
    else:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        scaled_backward(amp, model(inputs).float().square().mean(), optimizer)
        step = optimizer.step
    model.weight.grad = torch.full_like(model.weight, math.inf)
    step()
    return [value.float() for value in model.state_dict().values()]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_a_script_makes_of_unscaled_gradients_is_its_own(amp: ModuleType, level: str) -> None:
    """No block has made it: it is stepped, as by a `GradScaler` after its ``unscale_``."""
    expected_weight, expected_bias = given_inf(None)  # whose GradScaler amp would serve
    weight, bias = given_inf(amp, level)
    assert torch.equal(weight, expected_weight)
    assert not weight.isfinite().any()
    torch.testing.assert_close(bias, expected_bias, rtol=1e-2, atol=2e-3)
