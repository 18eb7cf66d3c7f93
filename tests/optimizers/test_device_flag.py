"""Which optimizers take a device's flag, and that a step by it is torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from amp_patch.optimizers.device_flag import must_be_told, skips_by_flag, step_by_flag
from amp_patch.optimizers.direct_step import DirectStep

FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.5, fused=True),
    "adam": lambda params: Adam(params, lr=0.5, amsgrad=True, maximize=True, fused=True),
    "sgd": lambda params: SGD(params, lr=0.5, weight_decay=0.1, fused=True),
    "momentum": lambda params: SGD(params, lr=0.5, momentum=0.5, nesterov=True, fused=True),
    "adagrad": lambda params: Adagrad(params, lr=0.5, weight_decay=0.1, fused=True),
}


def made(name: str) -> Optimizer:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    return FUSED[name]([{"params": [param], "lr": 0.5 / n} for n, param in enumerate(params, 1)])


def numbers(optimizer: Optimizer) -> list[Any]:
    return [optimizer.param_groups, list(optimizer.state.values())]


@pytest.mark.parametrize("name", FUSED)
def test_a_step_without_torchs_python_takes_the_flag_to_the_bit(name: str) -> None:
    ours, theirs = made(name), made(name)
    direct = DirectStep(ours)
    flags = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    for place, flag in enumerate(flags):
        for optimizer in (ours, theirs):
            torch.manual_seed(place)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.randn_like(param)
        direct.run(ours, torch.tensor(flag))
        step_by_flag(theirs, torch.tensor(flag), theirs.step)
        torch.testing.assert_close(numbers(ours), numbers(theirs), rtol=0, atol=0)
    if name in ("adamw", "adam"):
        made_steps = flags.count(0.0)
        assert [float(one["step"]) for one in ours.state.values()] == [made_steps] * 2
    assert not {"found_inf", "grad_scale"} & set(vars(theirs))


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_where_torchs_own_step_is_needed_it_gets_the_flag(flag: float) -> None:
    optimizer = made("adamw")
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)  # which only torch's own step takes
        group["params"][0].grad = torch.ones_like(group["params"][0])
    before = [group["params"][0].detach().clone() for group in optimizer.param_groups]
    DirectStep(optimizer).run(optimizer, torch.tensor(flag))
    after = [group["params"][0] for group in optimizer.param_groups]
    assert all(map(torch.equal, before, after)) == (flag == 1.0)
    assert not {"found_inf", "grad_scale"} & set(vars(optimizer))


@pytest.mark.parametrize("name", FUSED)
def test_a_flag_is_for_optimizers_of_which_each_group_is_fused(name: str) -> None:
    optimizer = made(name)
    assert skips_by_flag(optimizer)
    optimizer.param_groups[1]["fused"] = None  # as a checkpoint may have it
    assert not skips_by_flag(optimizer)
    assert not skips_by_flag(type(optimizer)([nn.Parameter(torch.ones(1))], lr=0.5))


def test_momentum_that_is_yet_to_be_made_needs_the_host() -> None:
    optimizer = made("momentum")
    assert not must_be_told(optimizer)  # there are no gradients
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    assert must_be_told(optimizer)
    optimizer.step()
    assert not must_be_told(optimizer)
