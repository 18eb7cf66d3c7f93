"""Gradients that a script clears by its model or by hand are gone, and an overflow with them."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD, Optimizer

from amp_patch.common.early_looks import WATCHED


def zero_model(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def zero_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.grad.zero_()


def zero_data(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.grad.data.zero_()


@pytest.mark.parametrize(("level", "fused_step"), [("O1", False), ("O2", False), ("O2", True)])
@pytest.mark.parametrize("zero", [zero_model, zero_by_hand, zero_data])
def test_a_script_that_skips_by_itself_and_zeroes_in_place_loses_no_other_step(
    amp: ModuleType, level: str, fused_step: bool, zero: Callable[[nn.Module, Optimizer], None]
) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.5)
    options = {"verbosity": 0, "init_scale": 8.0, "fused_step": fused_step}
    amp.initialize(model, optimizer, opt_level=level, **options)
    before = model.state_dict()["weight"].clone()
    for factor in (*[1.0] * WATCHED, torch.inf, 1.0, 1.0):
        loss = model(torch.ones(1, 2)).float().sum() * factor
        scaled_backward(amp, loss, optimizer)
        if amp.clip_grad_norm_(optimizer, 100.0).isfinite():
            optimizer.step()
        zero(model, optimizer)
    expected = before - (WATCHED + 2) * 0.5
    torch.testing.assert_close(model.state_dict()["weight"], expected, rtol=0, atol=1e-3)


def zero_layers(model: nn.Module, optimizer: Optimizer) -> None:
    for layer in model.children():
        layer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("zero", [zero_model, zero_layers])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_model_that_clears_in_place_clears_what_came_before_a_delayed_block(
    amp: ModuleType, level: str, zero: Callable[[nn.Module, Optimizer], None]
) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    for factor, delay in ((64.0, False), (16.0, True), (1.0, False)):
        if factor == 1.0:
            zero(model, optimizer)
        loss = model(torch.ones(1, 2)).float().sum() * factor
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
    (param,) = amp.master_params(optimizer)
    assert param.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.filterwarnings("ignore:at a level with a loss scale every loss")
@pytest.mark.filterwarnings("ignore:gradients must last until the step")
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(("level", "fused_step"), [("O1", False), ("O2", False), ("O2", True)])
def test_a_plain_backward_adds_to_the_zeros_of_what_waited_for_a_block(
    amp: ModuleType, level: str, fused_step: bool, set_to_none: bool
) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.5)
    options = {"verbosity": 0, "loss_scale": 8.0, "fused_step": fused_step}
    amp.initialize(model, optimizer, opt_level=level, **options)
    before = model.state_dict()["weight"].clone()
    loss = model(torch.ones(1, 2)).float().sum()
    with amp.scale_loss(loss * 16.0, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    model.zero_grad(set_to_none=set_to_none)
    model(torch.ones(1, 2)).float().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["weight"], before - 0.5, rtol=0, atol=1e-3)


def clear_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


@pytest.mark.parametrize("zero", [clear_by_hand, zero_by_hand, zero_model])
@pytest.mark.parametrize(("level", "fused_step"), [("O2", False), ("O2", True), ("O5", False)])
def test_gradients_that_were_cleared_by_hand_are_not_back_behind_deactivate(
    amp: ModuleType, level: str, fused_step: bool, zero: Callable[[nn.Module, Optimizer], None]
) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.5)
    options = {"verbosity": 0, "loss_scale": 8.0, "fused_step": fused_step}
    amp.initialize(model, optimizer, opt_level=level, **options)
    scaled_backward(amp, model(torch.ones(1, 2)).float().sum(), optimizer)
    zero(model, optimizer)
    amp.deactivate()
    assert not any(param.grad is not None and param.grad.any() for param in model.parameters())


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_script_gave_parameters_of_the_groups_is_cleared_by_a_part_of_the_model(
    amp: ModuleType, level: str, fused_step: bool, is_stepped: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, fused_step=fused_step, verbosity=0)
    if is_stepped:
        model(torch.ones(1, 2)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = optimizer.param_groups[0]["params"]
    for master in masters:
        master.grad = torch.ones_like(master)
    model[0].zero_grad()
    assert masters[0].grad is None
    assert masters[1].grad is not None
    model.zero_grad()
    assert masters[1].grad is None
