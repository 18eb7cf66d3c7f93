"""Wrappers of an optimizer that call its class: they clear and add what the optimizer would."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training import (
    LEVELS,
    assert_equal,
    batches,
    loss_of,
    make,
    prepared,
    trained_rightly,
    weights,
)


class Mimicking:
    """As LightningOptimizer: of the class of what it wraps, with a step of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Mimic", (self.__class__, type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Copying(Mimicking):
    """As earlier ones: it also has the attributes, less the methods that were replaced."""

    def __init__(self, optimizer: Optimizer) -> None:
        methods = ("step", "zero_grad", "add_param_group")
        vars(self).update({k: v for k, v in vars(optimizer).items() if k not in methods})
        super().__init__(optimizer)


class Delegating(Optimizer):
    """As AcceleratedOptimizer: an optimizer that was never initialized as one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


class CallingTheClass(Delegating):
    """By no object's methods but the class's."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        type(self.inner).zero_grad(self.inner, *args, **kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        Optimizer.add_param_group(self.inner, group)


WRAPPERS = [Mimicking, Copying, Delegating, CallingTheClass]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("options", [{}, {"set_to_none": False}])
def test_a_wrapper_clears_what_its_optimizer_would(
    amp: ModuleType, level: str, wrapper: Callable[[Optimizer], Any], options: dict[str, bool]
) -> None:
    model, optimizer = prepared(amp, level)
    wrapped = wrapper(optimizer)
    for inputs in batches():
        with amp.scale_loss(loss_of(model, inputs), wrapped) as scaled_loss:
            scaled_loss.backward()
        wrapped.step()
        wrapped.zero_grad(**options)
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        assert all((p.grad is None) is (not options) for p in model.parameters())
    assert_equal(weights(model), trained_rightly(level))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_a_wrapper_adds_is_stepped_as_the_rest(
    amp: ModuleType, level: str, wrapper: Callable[[Optimizer], Any]
) -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wrapped = wrapper(optimizer)
    wrapped.add_param_group({"params": list(model.last.parameters())})
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    for inputs in batches():
        wrapped.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), wrapped) as scaled_loss:
            scaled_loss.backward()
        wrapped.step()
    assert_equal(weights(model), trained_rightly(level))


def test_other_optimizers_are_left_alone(amp: ModuleType) -> None:
    prepared(amp, "O2")
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    Mimicking(optimizer).zero_grad()
    assert all(p.grad is None for p in other.parameters())
