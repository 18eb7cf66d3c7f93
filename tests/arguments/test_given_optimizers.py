"""Which optimizers are refused, and the words of each refusal."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from arguments_support import MEND, frozen, optimizer
from support import exactly
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from amp_patch import arguments
from amp_patch.arguments import given_optimizers


@pytest.mark.parametrize(
    ("optimizers", "received"),
    [
        (nn.Linear(1, 1), "Linear"),
        ([optimizer(), None], "NoneType"),
        ({"optimizer": optimizer()}, "dict"),
        (SGD, "type"),
        ("SGD", "str"),
        (StepLR(optimizer(), 5), "StepLR, which holds one to pass: its .optimizer"),
        (type("Optimizer", (), {"__module__": "fastai.optimizer"})(), "fastai.optimizer.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizers: Any, received: str) -> None:
    rule = "optimizers must be a torch.optim.Optimizer or a list or tuple of them"
    with pytest.raises(TypeError, match=exactly(f"{rule}; got {received}; {MEND}")):
        arguments.optimizers_of(optimizers)


def test_optimizers_for_a_call_become_a_list_without_repetition() -> None:
    first, second = optimizer(), optimizer(Adam)
    assert arguments.optimizers_for("call(optimizer)", first) == [first]
    given = (second, first, second)
    assert arguments.optimizers_for("call(optimizer)", given) == [second, first]


@pytest.mark.parametrize(
    ("given", "received"),
    [
        (None, "NoneType"),
        ([], "an empty list"),
        ((), "an empty tuple"),
        ([optimizer(), nn.Linear(1, 1)], "Linear"),
        (torch.zeros(()), "Tensor"),
        (SGD, "type"),
        (StepLR(optimizer(), 5), "StepLR, which holds one to pass: its .optimizer"),
    ],
)
def test_what_stands_for_optimizers_is_refused_with_the_call(given: Any, received: str) -> None:
    message = (
        f"call(optimizer) takes what amp.initialize() returned for its optimizers; got {received} "
        "in their place; call call(optimizer)."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.optimizers_for("call(optimizer)", given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_are_taken_where_they_are_frozen(dtype: torch.dtype) -> None:
    base = frozen(dtype)
    model = nn.Sequential(base, nn.Linear(1, 1))
    assert arguments.models_of(model) == [model]
    arguments.refuse_half_steps([optimizer(), Adam(model.parameters())])
    base.requires_grad_(True)
    message = (
        "optimizers of amp.initialize() train float32 parameters, for small updates are rounded "
        f"away in half precision; got 2 in {dtype} in the Adam that require a gradient. Call "
        ".float() on their layers before amp.initialize(), or freeze them by requires_grad_(False)."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_half_steps([optimizer(), Adam(model.parameters())])


def test_parameters_without_numbers_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    message = (
        "fp32 masters are made of parameters that have numbers; got an optimizer of type "
        "SGD with 2 on the meta device. Call model.to_empty(device=...) and load its "
        "weights, then make the optimizer of model.parameters(), then call amp.initialize()."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_meta([optimizer(), SGD(model.parameters(), lr=0.1)])
    frozen = SGD(model.requires_grad_(False).parameters(), lr=0.1)
    arguments.refuse_meta([frozen])  # as of weights that accelerate keeps elsewhere
    model.requires_grad_(True).to_empty(device="cpu")
    arguments.refuse_meta([SGD(model.parameters(), lr=0.1)])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_fake_tensors_are_refused_where_numbers_are_asked_for(amp: ModuleType, level: str) -> None:
    before = torch.nn.functional.linear, torch.Tensor.backward
    with FakeTensorMode():
        model = nn.Linear(2, 2)
        stepped = SGD(model.parameters(), lr=0.1)
        message = (
            "masters and loss scales need parameters that have numbers; got an optimizer of type "
            f"SGD with parameters of a FakeTensorMode at {level}. Call amp.initialize(model, "
            "optimizer, opt_level='O4') there, or build the model outside of the mode and measure "
            "a step of it."
        )
        with pytest.raises(RuntimeError, match=exactly(message)):
            amp.initialize(model, stepped, opt_level=level, verbosity=0)
    assert model.weight.dtype is torch.float32
    assert (torch.nn.functional.linear, torch.Tensor.backward) == before


@pytest.mark.parametrize("known_before", [False, True])
def test_an_optimizer_given_twice_is_refused(known_before: bool) -> None:
    message = (
        "A given optimizer should only be passed through amp.initialize once; got the same Adam "
        "again. Use the optimizer that the first call returned, or call amp.deactivate() before "
        "you initialize it anew."
    )
    first, twice = optimizer(), optimizer(Adam)
    given, known = ([first, twice], [twice]) if known_before else ([twice, first, twice], [])
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_twice(given, known)
    arguments.refuse_twice([first, twice], [optimizer()])


def test_one_state_of_two_optimizers_of_the_same_parameters_is_refused() -> None:
    message = (
        "at a level with fp32 masters each optimizer steps masters of its own, and its state goes "
        "by them; got SGD and Adam of the same parameters with one state. Give each a state of "
        "its own, or call amp.initialize(..., opt_level='O1')."
    )
    first, second, other = optimizer(), optimizer(Adam), optimizer()
    second.param_groups[0]["params"] = list(first.param_groups[0]["params"])
    arguments.refuse_shared_state([first, second, other])
    second.state = other.state = first.state
    with pytest.raises(RuntimeError, match=exactly(message)):
        arguments.refuse_shared_state([other, first, second])
    arguments.refuse_shared_state([other, first])


@pytest.mark.parametrize("given", [None, nn.Linear(1, 1), [optimizer()], iter([]), "SGD", SGD])
def test_what_is_not_one_optimizer_is_refused(given: Any) -> None:
    message = (
        "amp.master_params() takes one optimizer, as amp.initialize() returned it; got "
        f"{type(given).__name__}; call amp.master_params(optimizer), once for each optimizer."
    )
    with pytest.raises(TypeError, match=exactly(message)):
        arguments.optimizer_of(given, "amp.master_params()")
    known = optimizer()
    assert arguments.optimizer_of(known, "amp.master_params()") is known


def test_optimizers_without_a_state_share_none() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}]
    proxies: Any = [SimpleNamespace(param_groups=groups) for _ in range(2)]
    given_optimizers.refuse_shared_state(proxies)
    for proxy in proxies:
        proxy.state = groups
    with pytest.raises(RuntimeError, match="of the same parameters with one state"):
        given_optimizers.refuse_shared_state(proxies)
