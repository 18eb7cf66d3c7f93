"""A backward that is not the scaled loss's, or comes after its block, is refused."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
X = torch.linspace(-1, 1, 12).reshape(4, 3)


def prepared(
    amp: ModuleType, level: str, loss_scale: Any = 64.0
) -> tuple[nn.Module, Optimizer, Optimizer]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizers = [SGD(part.parameters(), lr=0.5) for part in model]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0)
    return model, *optimizers


def loss_of(model: nn.Module, inputs: Tensor = X) -> Tensor:
    loss: Tensor = model(inputs).float().square().mean()
    return loss


@pytest.mark.parametrize("level", LEVELS)
def test_the_backward_of_another_loss_is_refused_and_its_gradients_go(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    both = [first, second]
    with amp.scale_loss(loss_of(model), both) as scaled_loss:
        scaled_loss.backward()
    before = [p.grad.clone() for optimizer in both for p in amp.master_params(optimizer)]
    loss = loss_of(model)
    with (
        pytest.raises(RuntimeError, match=r"got gradients of another one.*scaled_loss\.backward"),
        amp.scale_loss(loss, both),
    ):
        loss.backward()
    after = [p.grad for optimizer in both for p in amp.master_params(optimizer)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delayed", [False, True])
def test_a_second_backward_of_another_loss_is_refused_while_gradients_are_delayed(
    amp: ModuleType, level: str, delayed: bool
) -> None:
    model, *both = prepared(amp, level)
    with amp.scale_loss(loss_of(model), both, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    loss = loss_of(model)
    with (
        pytest.raises(RuntimeError, match="must be that of the loss it yields"),
        amp.scale_loss(loss, both, delay_unscale=delayed),
    ):
        loss.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_of_1_makes_no_difference(amp: ModuleType, level: str) -> None:
    model, *both = prepared(amp, level, loss_scale=1.0)
    loss = loss_of(model)
    with amp.scale_loss(loss, both):
        loss.backward()
    assert all(p.grad.any() for optimizer in both for p in amp.master_params(optimizer))


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_behind_the_block_is_refused_before_it_writes(
    amp: ModuleType, level: str
) -> None:
    model, *both = prepared(amp, level)
    with amp.scale_loss(loss_of(model), both) as scaled_loss:
        pass
    with pytest.raises(RuntimeError, match="must run inside of its scale_loss.*Indent it"):
        scaled_loss.backward()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_computed_from_the_scaled_loss_is_its_backward(amp: ModuleType, level: str) -> None:
    model, *both = prepared(amp, level)
    with amp.scale_loss(loss_of(model), both) as scaled_loss:
        (scaled_loss / 2).backward()
    with amp.scale_loss(loss_of(model), both) as scaled_loss:
        grads = torch.autograd.grad(scaled_loss, list(model.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
    for optimizer in both:
        optimizer.step()
        assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_who_asks_for_the_gradient_of_an_input_is_told_nothing(amp: ModuleType, level: str) -> None:
    model, *both = prepared(amp, level)
    inputs = X.clone().requires_grad_()
    loss = loss_of(model, inputs)
    with amp.scale_loss(loss, both) as scaled_loss:
        (grad,) = torch.autograd.grad(scaled_loss, inputs)
        grad /= scaled_loss / loss
    assert grad.isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_copy", [False, True])
def test_gradients_of_parameters_that_nobody_assigns_are_told_of(
    amp: ModuleType, level: str, is_copy: bool
) -> None:
    model, *both = prepared(amp, level)
    inputs = X.clone().requires_grad_(is_copy)
    other = copy.deepcopy(model) if is_copy else model
    with (
        pytest.warns(UserWarning, match="must reach parameters of its optimizers"),
        amp.scale_loss(loss_of(other, inputs), both) as scaled_loss,
    ):
        torch.autograd.grad(scaled_loss, list(other.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_backward_of_a_later_block_may_run_through_the_scaled_loss(
    amp: ModuleType, level: str
) -> None:
    model, *both = prepared(amp, level)
    norms = []
    for is_scaled in (False, True):
        inputs = X.clone().requires_grad_()
        loss = model(inputs).float().square().mean()
        if is_scaled:  # as GradAlign takes the gradients of inputs
            with amp.scale_loss(loss, both) as scaled_loss:
                (grad,) = torch.autograd.grad(scaled_loss, inputs, create_graph=True)
                grad = grad / (scaled_loss / loss)
        else:
            (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
        with amp.scale_loss(grad.float().square().sum(), both) as scaled_loss:
            scaled_loss.backward()
        masters = [p for optimizer in both for p in amp.master_params(optimizer)]
        norms.append(torch.stack([p.grad.norm() for p in masters if p.grad is not None]))
        model.zero_grad()
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-2, atol=0)
