"""A loss that reaches masters themselves, as a penalty on optimizer.param_groups does."""

import gc
import warnings
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn

X = torch.linspace(-1, 1, 12).reshape(4, 3)
PENALTY = 0.25


def prepared(amp: ModuleType, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"opt_level": "O2", "loss_scale": 64.0, "verbosity": 0} | options
    amp.initialize(model, optimizer, **options)
    return model, optimizer


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params: list[Tensor] = optimizer.param_groups[0]["params"]
    return params


def penalty(optimizer: torch.optim.Optimizer) -> Tensor:
    return PENALTY * torch.stack([param.abs().sum() for param in stepped(optimizer)]).sum()


def grads(amp: ModuleType, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("passes", ["one", "two", "delayed"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_penalty_on_masters_has_its_true_gradient(
    amp: ModuleType, passes: str, fused: bool
) -> None:
    model, optimizer = prepared(amp, fused_step=fused)
    count = 1 if passes == "one" else 2
    for row in range(count):
        is_last = row == count - 1 or passes == "two"
        scaled_backward(amp, model(X).square().sum(), optimizer, delay_unscale=not is_last)
    without = grads(amp, optimizer)
    optimizer.zero_grad()
    for row in range(count):
        is_last = row == count - 1 or passes == "two"
        loss = model(X).square().sum() + penalty(optimizer)
        scaled_backward(amp, loss, optimizer, delay_unscale=not is_last)
    for param, grad, before in zip(stepped(optimizer), grads(amp, optimizer), without, strict=True):
        torch.testing.assert_close(grad - before, count * PENALTY * param.detach().sign())


def test_a_penalty_has_its_true_gradient_behind_another_group_of_parameters(
    amp: ModuleType,
) -> None:
    model, optimizer = prepared(amp)
    scaled_backward(amp, model(X).square().sum(), optimizer)
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    scaled_backward(amp, penalty(optimizer), optimizer)
    for param in stepped(optimizer):
        torch.testing.assert_close(param.grad, PENALTY * param.detach().sign())


def test_a_block_of_the_penalty_alone_trains_without_a_word(amp: ModuleType) -> None:
    _, optimizer = prepared(amp)
    before = [param.detach().clone() for param in stepped(optimizer)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_backward(amp, penalty(optimizer), optimizer)
        optimizer.step()
    for param, value in zip(stepped(optimizer), before, strict=True):
        torch.testing.assert_close(param.detach(), value - 0.5 * PENALTY * value.sign())


def test_outside_of_a_block_nothing_is_divided(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    scaled_backward(amp, model(X).sum(), optimizer)
    optimizer.step()
    penalty(optimizer).backward()
    for param in stepped(optimizer):
        assert param.grad is not None
        assert torch.equal(param.grad, PENALTY * param.detach().sign())


def test_masters_go_with_amp(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    scaled_backward(amp, model(X).sum() + penalty(optimizer), optimizer)
    master = weakref.ref(stepped(optimizer)[0])
    amp.deactivate()
    gc.collect()
    assert master() is None


def test_gradients_that_a_script_gives_to_masters_in_a_block_are_refused(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    before = [param.detach().clone() for param in stepped(optimizer)]
    block = amp.scale_loss(model(X).sum(), optimizer)
    found = torch.autograd.grad(block.__enter__(), list(model.parameters()))
    for param, grad in zip(stepped(optimizer), found, strict=True):
        param.grad = grad.float()
    with pytest.raises(RuntimeError, match=r"got 2 that a script has given to fp32 masters in it"):
        block.__exit__(None, None, None)
    with pytest.warns(UserWarning, match=r"got an optimizer.step\(\) after one, which has none"):
        optimizer.step()
    assert all(map(torch.equal, stepped(optimizer), before))


def test_a_backward_adds_to_zeros_that_a_script_has_given_to_masters(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, opt_level="O5", loss_scale=1.0)
    before = [param.detach().clone() for param in stepped(optimizer)]
    for param in stepped(optimizer):
        param.grad = torch.zeros_like(param)
    model(X).sum().backward()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    grads = [X.sum(0), torch.tensor(float(len(X)))]
    expected = [value - rate * grad for value, grad in zip(before, grads, strict=True)]
    torch.testing.assert_close(stepped(optimizer), expected, rtol=1e-2, atol=1e-2)
