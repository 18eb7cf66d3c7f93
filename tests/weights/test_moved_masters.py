"""``master.data = t`` is a write, by a script or the optimizer: it is computed with, and saved."""

from types import ModuleType
from typing import Any

import pytest
import torch
from fine_linear import assert_same, copies, prepared, train_step
from support import scaled_backward
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD, Adagrad, Adam, Optimizer

LEVELS = ["O2", "O5"]


def stepped(amp: ModuleType, level: str, steps: int) -> tuple[nn.Linear, Any]:
    """Return a layer and its optimizer after some steps."""
    model, optimizer = prepared(amp, level, nn.Linear(3, 2), Adam)
    for _ in range(steps):
        train_step(amp, model, optimizer, torch.randn(4, 3))
    return model, optimizer


class AssigningSGD(Optimizer):
    """Gives its parameters new storages, as optimizers written by hand do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_assigns_data_trains_as_one_that_writes(
    amp: ModuleType, level: str
) -> None:
    states = []
    for make in (AssigningSGD, SGD):
        torch.manual_seed(0)
        model, optimizer = prepared(amp, level, nn.Linear(5, 3), make)
        for _ in range(4):
            train_step(amp, model, optimizer, torch.ones(2, 5))
        states.append(copies(model))
        assert_same(
            {k: p.detach().float() for k, p in model.named_parameters()},
            {k: v.to(model.weight.dtype).float() for k, v in states[-1].items()},
        )
        amp.deactivate()
    assert_same(*states)


@pytest.mark.parametrize("level", LEVELS)
def test_masters_that_an_optimizer_of_another_class_gives_other_memory_are_read(
    amp: ModuleType, level: str
) -> None:
    model = nn.Linear(8, 2)
    model, optimizer = amp.initialize(
        model, Adagrad(model.parameters()), opt_level=level, verbosity=0
    )
    inputs = torch.randn(4, 8)
    for value in (1.0, 2.0):
        for master in optimizer.param_groups[0]["params"]:
            master.data = torch.full_like(master, value)
        model(inputs)
        assert all((half == value).all() for half in model.parameters())
        optimizer.zero_grad()
        scaled_backward(amp, model(inputs).sum(), optimizer)
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", [0, 1, 20])
def test_a_state_dict_has_what_data_was_set_to(amp: ModuleType, level: str, steps: int) -> None:
    model, optimizer = stepped(amp, level, steps)
    weight, bias = optimizer.param_groups[0]["params"]
    weight.data = torch.arange(6.0).reshape(2, 3) / 7
    state = model.state_dict()
    torch.testing.assert_close(state["weight"], torch.arange(6.0).reshape(2, 3) / 7, rtol=0, atol=0)
    torch.testing.assert_close(state["bias"], bias.detach(), rtol=0, atol=0)
    output = model(torch.eye(3)) - model(torch.zeros(3, 3))
    torch.testing.assert_close(output.float(), state["weight"].T, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_each_data_that_is_set_counts_also_with_a_state_dict_between(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = stepped(amp, level, 20)
    weight, bias = optimizer.param_groups[0]["params"]
    weight.data = torch.full((2, 3), 3.0)
    model.state_dict()
    bias.data = torch.full((2,), 5.0)
    model(torch.randn(4, 3))
    assert model.weight.eq(3.0).all()
    assert model.bias.eq(5.0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("first", ["elsewhere", "in place"])
def test_data_that_is_set_behind_a_state_dict_of_written_masters_counts(
    amp: ModuleType, level: str, first: str
) -> None:
    model, optimizer = stepped(amp, level, 0)
    masters = optimizer.param_groups[0]["params"]
    if first == "elsewhere":
        vector_to_parameters(torch.full((8,), 3.0), masters)
    else:
        with torch.no_grad():
            for master in masters:
                master.fill_(3.0)
    kept = model.state_dict()
    vector_to_parameters(torch.full((8,), 5.0), masters)
    model(torch.randn(4, 3))
    assert model.weight.eq(5.0).all()
    assert masters[0].eq(5.0).all()
    del kept


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("between", ["nothing", "half weight elsewhere", "load"])
def test_data_that_is_set_before_masters_are_handed_out_counts(
    amp: ModuleType, level: str, between: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = Adam(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    optimizer.param_groups[0]["params"][2].data = torch.full((2, 2), 5.0)
    if between == "half weight elsewhere":
        model[0].weight.data = model[0].weight.data * 2
    elif between == "load":
        model[0].load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    list(amp.master_params(optimizer))
    model(torch.randn(4, 3))
    assert model[1].weight.eq(5.0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_masters_that_change_places_behind_a_read_are_taken_for_written(
    amp: ModuleType, level: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    scaled_backward(amp, model(torch.randn(3, 4)).float().square().mean(), optimizer)
    optimizer.step()
    one, other = optimizer.param_groups[0]["params"]
    other.data = other.data * 2
    model(torch.randn(3, 4))
    list(amp.master_params(optimizer))
    expected = [other.detach().clone(), one.detach().clone()]
    one.data, other.data = other.data, one.data
    model(torch.randn(3, 4))
    for param, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach(), value.to(param.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("of_master", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_is_set_to_its_transpose_stays_so(
    amp: ModuleType, level: str, bias: bool, of_master: bool
) -> None:
    model = nn.Linear(4, 4, bias=bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(2, 4)).float().sum(), optimizer)
        optimizer.step()

    step()
    before = model.weight.detach().clone()
    written = next(iter(amp.master_params(optimizer))) if of_master else model.weight
    written.data = written.data.t()  # in the same memory
    for _ in range(2):
        step()
        assert torch.equal(model.weight, before.t())
        assert torch.equal(model.state_dict()["weight"].to(before.dtype), before.t())
