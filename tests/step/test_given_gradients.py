"""Gradients that a script gives after its blocks; a step is skipped where they are not finite."""

import math

import pytest
import torch
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
