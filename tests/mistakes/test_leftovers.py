"""Gradients that are still there, or went elsewhere: told where plain PyTorch does otherwise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import LEVELS, batches, loss_of, make, prepared

HAS_MASTERS = ("O2", "O5")


def backward(amp: ModuleType, model: nn.Module, optimizer: Any, inputs: Any) -> None:
    with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
        scaled_loss.backward()


@contextmanager
def telling(message: str, count: int) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [message in str(one.message) for one in caught] == [True] * count
    assert [one.filename for one in caught] == [__file__] * count


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mistake", ["no zero_grad", "two steps"])
def test_gradients_of_the_last_step_are_told_of(amp: ModuleType, level: str, mistake: str) -> None:
    model, optimizer = prepared(amp, level)
    where = {"no zero_grad": "got a scale_loss() block", "two steps": "got an optimizer.step()"}
    with telling(where[mistake], int(level in HAS_MASTERS)):
        for inputs in batches():
            if mistake == "two steps":
                optimizer.zero_grad()
            backward(amp, model, optimizer, inputs)
            optimizer.step()
            if mistake == "two steps":
                optimizer.step()


@pytest.mark.parametrize("level", HAS_MASTERS)
def test_they_are_where_some_parameters_are_float32(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0
    )
    with telling("got a scale_loss() block", 1):
        for inputs in torch.randn(3, 6, 4):
            backward(amp, model, optimizer, inputs)
            optimizer.step()


CLEARS = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "set_to_none=False": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "p.grad = None": lambda model, _: [setattr(p, "grad", None) for p in model.parameters()],
    "p.grad.zero_()": lambda model, _: [
        p.grad is None or p.grad.zero_() for p in model.parameters()
    ],
    "p.grad.data.zero_()": lambda model, _: [
        p.grad is None or p.grad.data.zero_() for p in model.parameters()
    ],
}


@pytest.mark.parametrize("level", HAS_MASTERS)
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("passes", [1, 2])
def test_no_way_to_clear_them_is(amp: ModuleType, level: str, clear: str, passes: int) -> None:
    model, optimizer = prepared(amp, level)
    with telling("", 0):
        for inputs in batches():
            CLEARS[clear](model, optimizer)
            for _ in range(passes):
                backward(amp, model, optimizer, inputs)
            optimizer.step()


@pytest.mark.parametrize("level", HAS_MASTERS)
def test_they_may_be_cleared_in_the_block(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    with telling("", 0):
        for inputs in batches():
            with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
                optimizer.zero_grad()
                scaled_loss.backward()
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("trained", ["copy", "frozen"])
def test_a_loss_that_reaches_no_parameter_of_its_optimizer(
    amp: ModuleType, level: str, trained: str
) -> None:
    model, optimizer = prepared(amp, level)
    twin = copy.deepcopy(model)
    if trained == "frozen":
        model.requires_grad_(False)
    with telling("must reach parameters of its optimizers", int(trained == "copy")):
        for inputs in batches():
            backward(amp, twin, optimizer, inputs)
            optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_zero_in_the_place_of_a_loss_is_none_of_these(amp: ModuleType, level: str) -> None:
    """As of a batch without labels; warnings are errors here."""
    model, optimizer = prepared(amp, level)
    for number, inputs in enumerate(batches()):
        loss = loss_of(model, inputs) if number % 2 else torch.tensor(0.0, requires_grad=True)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize(
    "make_leaf",
    [
        lambda loss: torch.tensor(loss.item(), requires_grad=True),
        lambda loss: loss.detach().requires_grad_(),
        lambda loss: torch.autograd.Variable(loss.data, requires_grad=True),
    ],
    ids=["item", "detach", "Variable"],
)
def test_a_loss_that_the_script_has_made_anew(
    amp: ModuleType, level: str, make_leaf: Callable[[Tensor], Tensor]
) -> None:
    model, optimizer = prepared(amp, level)
    with telling("must be what the criterion returned", 1):
        for inputs in batches():
            with amp.scale_loss(make_leaf(loss_of(model, inputs)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_leaf_whose_hook_runs_the_backward_is_a_loss(amp: ModuleType, level: str) -> None:
    """As where gradients of large batches are cached, and the graph is made again in parts."""
    model, optimizer = prepared(amp, level)
    with telling("must be what the criterion returned", 0):
        for inputs in batches():
            loss = loss_of(model, inputs)
            leaf = loss.detach().requires_grad_()
            leaf.register_hook(lambda grad, loss=loss: loss.backward(grad.to(loss.dtype)))
            optimizer.zero_grad()
            with amp.scale_loss(leaf, optimizer) as scaled_loss:
                scaled_loss.backward()
            assert all(param.grad is not None for param in model.parameters())
            optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_without_parameters(amp: ModuleType, level: str) -> None:
    model, _ = make()
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with telling("whose groups are empty", 1):
        for inputs in batches():
            backward(amp, model, optimizer, inputs)
            optimizer.step()
        optimizer.add_param_group({"params": [*model.parameters()]})
        backward(amp, model, optimizer, next(batches()))


def test_a_parameter_may_be_the_loss(amp: ModuleType) -> None:
    class Height(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.height = nn.Parameter(torch.ones(()))

        def forward(self) -> Tensor:
            return self.height

    model = Height()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.height.item() == 0.5
