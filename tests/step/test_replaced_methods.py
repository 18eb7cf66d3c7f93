"""Methods in the place of an optimizer's: called with what they replace, freed and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD

from amp_patch.step.replaced_methods import ReplacedMethods, own_methods


class Owner:
    def __init__(self) -> None:
        self.methods = ReplacedMethods()
        self.calls: list[tuple[Any, ...]] = []
        self.seen: list[Any] = []

    def method(self, original: Callable[..., Any], *args: Any) -> Any:
        self.calls.append(args)
        self.seen.append(self.methods.in_place_of("zero_grad"))
        with self.methods.in_original():
            self.seen.append(self.methods.in_place_of("zero_grad"))
            return original(*args)


def optimizer_with_gradient() -> tuple[SGD, torch.nn.Parameter]:
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    return SGD([param]), param


def test_a_method_gets_what_it_replaces_and_the_arguments() -> None:
    (optimizer, param), owner = optimizer_with_gradient(), Owner()
    owner.methods.replace(optimizer, "zero_grad", owner.method)
    optimizer.zero_grad(False)
    assert owner.calls == [(False,)]
    assert param.grad is not None
    assert param.grad.item() == 0.0
    assert owner.seen == [vars(optimizer)["zero_grad"], None]
    owner.methods.undo()
    assert "zero_grad" not in vars(optimizer)


def test_that_of_a_wrapped_optimizer_is_not_the_optimizers_own() -> None:
    (optimizer, _), owner = optimizer_with_gradient(), Owner()
    owner.methods.replace(optimizer, "zero_grad", owner.method, is_wrapped=True)
    optimizer.zero_grad()
    assert owner.calls == [()]
    assert owner.seen == [None, None]


def test_one_that_a_user_has_set_is_what_is_replaced_and_comes_back() -> None:
    (optimizer, _), owner = optimizer_with_gradient(), Owner()
    users: list[str] = []
    own = optimizer.zero_grad = lambda: users.append("called")
    owner.methods.replace(optimizer, "zero_grad", owner.method)
    optimizer.zero_grad()
    assert (owner.calls, users) == ([()], ["called"])
    owner.methods.undo()
    assert optimizer.zero_grad is own


def test_when_its_owner_is_gone_the_replaced_method_is_called() -> None:
    (optimizer, param), owner = optimizer_with_gradient(), Owner()
    owner.methods.replace(optimizer, "zero_grad", owner.method)
    calls = owner.calls
    del owner
    optimizer.zero_grad()
    assert calls == []
    assert param.grad is None


def test_when_it_is_undone_what_a_scheduler_holds_calls_the_replaced_method() -> None:
    """Its owner may live on for a while, until the garbage collector comes."""
    (optimizer, param), owner = optimizer_with_gradient(), Owner()
    owner.methods.replace(optimizer, "zero_grad", owner.method)
    held = optimizer.zero_grad
    owner.methods.undo()
    held()
    assert owner.calls == []
    assert param.grad is None


def test_own_methods_are_those_that_torchs_optimizers_have_not() -> None:
    class Base(SGD):
        def first_step(self) -> None: ...
        def step(self, closure: Any = None) -> None: ...

    class Own(Base):
        def second_step(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def _hidden(self) -> None: ...

        @staticmethod
        def helper() -> None: ...

        @property
        def rate(self) -> float:
            raise AssertionError("is not to be asked for")

        defaults_of = dict

    param = torch.nn.Parameter(torch.ones(1))
    assert own_methods(SGD([param])) == []
    assert sorted(own_methods(Own([param]))) == ["first_step", "second_step"]
