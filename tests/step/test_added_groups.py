"""Groups that an initialized optimizer is given later: taken as torch takes them, or refused."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fine_linear import assert_same, copies, fine_linear, train_step
from torch import nn
from torch.optim import SGD

from amp_patch.weights import master_pairs
from amp_patch.weights.fp32_values import FP32Values

F32 = torch.float32
LEVELS = ("O2", "O5")  # which have masters

GIVEN_AS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda layer: list(layer.parameters()),
    "tuple": lambda layer: tuple(layer.parameters()),
    "generator": lambda layer: layer.parameters(),
}


@pytest.mark.parametrize("given_as", GIVEN_AS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_group_may_come_later(amp: ModuleType, level: str, given_as: str, when: str) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    expected = model[1].bias.detach().clone()
    optimizer = SGD(model[0].parameters(), lr=0.125)
    group = {"params": GIVEN_AS[given_as](model[1]), "lr": 0.5}
    if when == "before":
        optimizer.add_param_group(group)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    train_step(amp, model, optimizer)
    if when == "after":
        optimizer.add_param_group(group)
    else:
        expected -= 1.0
    assert {master.dtype for master in amp.master_params(optimizer)} == {F32}
    train_step(amp, model, optimizer)
    assert torch.equal(copies(model)["1.bias"], expected - 1.0)


def test_a_single_tensor_makes_a_group(amp: ModuleType) -> None:
    model, optimizer = fine_linear(), None
    optimizer = SGD([model.weight], lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    optimizer.add_param_group({"params": model.bias})
    (bias,) = optimizer.param_groups[1]["params"]
    assert bias.dtype is F32
    assert torch.equal(bias, model.state_dict()["bias"])


def test_named_parameters_keep_their_names(amp: ModuleType) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    optimizer = SGD(model[0].named_parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    optimizer.add_param_group({"params": model[1].named_parameters()})
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight", "bias"]] * 2
    assert {master.dtype for master in amp.master_params(optimizer)} == {F32}


def test_a_gradient_that_a_new_group_brings_is_stepped(amp: ModuleType) -> None:
    model = fine_linear()
    model.bias.grad = torch.full((3,), 2.0)
    expected = model.bias.detach() - 0.25
    optimizer = SGD([model.weight], lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    optimizer.add_param_group({"params": [model.bias]})
    optimizer.step()
    assert torch.equal(model.state_dict()["bias"], expected)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "there already": (
        lambda model: {"params": [model[1].bias, model[0].weight]},
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "a set": (
        lambda model: {"params": {model[1].bias}},
        TypeError,
        "organized in ordered collections",
    ),
    "no tensor": (
        lambda model: {"params": [model[1].bias, "text"]},
        TypeError,
        "optimizer can only optimize Tensors",
    ),
    "some named": (
        lambda model: {"params": [("bias", model[1].bias), model[1].weight]},
        ValueError,
        "with/without names",
    ),
    "not a dict": (lambda model: [model[1].bias], TypeError, "param_group must be a dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_group_that_torch_refuses_changes_nothing(amp: ModuleType, case: str) -> None:
    make_group, error, message = REFUSED[case]
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    model[1].bias.grad = torch.full((3,), 2.0)
    expected = copies(model)
    optimizer = SGD(model[0].parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0
    )
    masters = list(amp.master_params(optimizer))
    with pytest.raises(error, match=message):
        optimizer.add_param_group(make_group(model))
    assert len(optimizer.param_groups) == 1
    assert all(a is b for a, b in zip(amp.master_params(optimizer), masters, strict=True))
    assert_same(copies(model), expected)
    optimizer.step()  # which takes no gradient of what it does not hold
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.step()
    assert torch.equal(copies(model)["1.bias"], expected["1.bias"] - 0.25)
    assert torch.equal(copies(model)["1.weight"], expected["1.weight"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", [(FP32Values, "take"), (master_pairs, "is_spread")])
def test_a_group_for_which_memory_runs_out_changes_nothing(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, where: tuple[Any, str]
) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    expected = copies(model)
    optimizer = SGD(model[0].parameters(), lr=0.125)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    masters = list(amp.master_params(optimizer))
    original, made = getattr(*where), []

    def second_fails(*args: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise torch.OutOfMemoryError
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(*where, second_fails)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.add_param_group({"params": list(model[1].parameters())})
    assert len(optimizer.param_groups) == 1
    assert all(a is b for a, b in zip(amp.master_params(optimizer), masters, strict=True))
    assert_same(copies(model), expected)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
    train_step(amp, model, optimizer)
    amp.deactivate()
    assert torch.equal(copies(model)["1.bias"], expected["1.bias"] - 1.0)


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
@pytest.mark.parametrize("level", LEVELS)
def test_a_refused_group_leaves_what_another_optimizer_knows(amp: ModuleType, level: str) -> None:
    model = nn.Sequential(fine_linear(4, 4), fine_linear())
    first = SGD(model.parameters(), lr=0.125)
    second = SGD(model[0].parameters(), lr=0.125)
    amp.initialize(model, [first, second], opt_level=level, loss_scale=64.0, verbosity=0)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        second.add_param_group({"params": [model[1].bias, model[0].weight]})
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), first) as scaled_loss:
        scaled_loss.backward()
    first.step()
    with torch.no_grad():
        model[1].bias.fill_(0.5)
    assert torch.equal(model.state_dict()["1.bias"], torch.full((3,), 0.5))
    first.step()
    assert torch.equal(model[1].bias.float(), torch.full((3,), 0.5))
