"""A backward in parts: the gradient of a detached tensor begins the next part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import LEVELS, batches

from amp_patch import amp as core

SCALE = 128.0
#: Trains a pair on inputs: amp, the scaler, the front, the back, the optimizers of the two.
Backward = Callable[[Any, Any, Any, Any, Any, Tensor], None]


class Back(nn.Module):
    """The second half of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.tanh())


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def whole(amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor) -> None:
    with amp.scale_loss(loss_of(back(front(inputs))), optimizers) as scaled_loss:
        scaled_loss.backward()


def by_its_gradient(
    amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor
) -> None:
    hidden = front(inputs)
    cut = hidden.detach().requires_grad_()
    with amp.scale_loss(loss_of(back(cut)), optimizers) as scaled_loss:
        scaled_loss.backward()
        hidden.backward(cut.grad)


def by_a_copy(
    amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor
) -> None:
    hidden = front(inputs)
    cut = hidden.detach().requires_grad_()
    with amp.scale_loss(loss_of(back(cut)), optimizers) as scaled_loss:
        scaled_loss.backward()
        assert cut.grad is not None
        torch.autograd.backward([hidden], [cut.grad.clone()])


def by_halves(
    amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor
) -> None:
    """Once more for the gradient, as a cache of gradients does, and by two micro-batches."""
    with torch.no_grad():
        cut = front(inputs)
    cut = cut.detach().requires_grad_()
    with amp.scale_loss(loss_of(back(cut)), optimizers) as scaled_loss:
        scaled_loss.backward()
        assert cut.grad is not None
        for part, grad in zip(inputs.split(8), cut.grad.split(8), strict=True):
            front(part).backward(grad)


def in_three(amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor) -> None:
    hidden = front(inputs)
    between = hidden.detach().requires_grad_()
    later = between * 1.0
    cut = later.detach().requires_grad_()
    with amp.scale_loss(loss_of(back(cut)), optimizers) as scaled_loss:
        scaled_loss.backward()
        later.backward(cut.grad)
        hidden.backward(between.grad)


def of_a_scaler(
    amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor
) -> None:
    hidden = front(inputs)
    cut = hidden.detach().requires_grad_()
    scaler.scale(loss_of(back(cut))).backward()
    hidden.backward(cut.grad)


def of_a_scaler_by_a_product(
    amp: Any, scaler: Any, front: Any, back: Any, optimizers: Any, inputs: Tensor
) -> None:
    for part in inputs.split(8):  # accumulated
        hidden = front(part)
        cut = hidden.detach().requires_grad_()
        scaler.scale(loss_of(back(cut)) / 2).backward()
        assert cut.grad is not None
        (hidden * cut.grad).sum().backward()


def trained(
    amp: ModuleType, level: str, backward: Backward, optimizers_of: int, steps_by_scaler: bool
) -> list[Tensor]:
    """Return the weights of a pair after a training."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 8), Back()]
    groups = [list(model.parameters()) for model in models]
    if optimizers_of == 1:
        groups = [groups[0] + groups[1]]
    optimizers = [torch.optim.SGD(group, lr=0.05, momentum=0.5) for group in groups]
    options = {} if level == "O5" else {"loss_scale": SCALE}
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    scaler = torch.amp.GradScaler("cpu")
    for inputs in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(amp, scaler, *models, optimizers, inputs)
        for optimizer in optimizers:
            scaler.step(optimizer) if steps_by_scaler else optimizer.step()
        if steps_by_scaler:
            scaler.update()
    weights = [value.clone() for model in models for value in model.state_dict().values()]
    core.deactivate()
    return weights


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizers_of", [1, 2])
@pytest.mark.parametrize("backward", [by_its_gradient, by_a_copy, by_halves, in_three])
def test_it_trains_as_one_backward_does(
    amp: ModuleType, level: str, optimizers_of: int, backward: Backward
) -> None:
    expected = trained(amp, level, whole, optimizers_of, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trained(amp, level, backward, optimizers_of, False)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("optimizers_of", [1, 2])
@pytest.mark.parametrize("backward", [of_a_scaler, of_a_scaler_by_a_product])
def test_it_is_unscaled_by_a_grad_scaler(
    amp: ModuleType, level: str, optimizers_of: int, backward: Backward
) -> None:
    expected = trained(amp, level, whole, optimizers_of, False)
    got = trained(amp, level, backward, optimizers_of, True)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)


def test_an_optimizer_that_steps_itself_is_not_unscaled_behind_it(amp: ModuleType) -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second)]
    amp.initialize([first, second], optimizers, opt_level="O1", verbosity=0, loss_scale=SCALE)
    scaler = torch.amp.GradScaler("cpu")
    weight = second.weight.detach().clone()
    for inputs in batches():
        optimizers[1].zero_grad()
        scaler.scale(loss_of(first(inputs))).backward()
        loss_of(second(inputs)).backward()
        assert second.weight.grad is not None
        weight -= 0.05 * second.weight.grad
        optimizers[1].step()
        torch.testing.assert_close(second.weight.detach(), weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_another_loss_with_a_given_gradient_is_refused(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    inputs = next(batches()).requires_grad_()
    with amp.scale_loss(loss_of(model(inputs)), optimizer) as scaled_loss:
        scaled_loss.backward()
        outputs = model(inputs)
        with pytest.raises(RuntimeError, match="must be that of the loss it yields"):
            outputs.backward(torch.ones_like(outputs))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_divided", [False, True])
def test_scaled_gradients_that_are_handed_on_behind_the_block_are_told_of(
    amp: ModuleType, level: str, is_divided: bool
) -> None:
    front, back = nn.Linear(4, 8), Back()
    params = [*front.parameters(), *back.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    amp.initialize([front, back], optimizer, opt_level=level, verbosity=0, loss_scale=SCALE)
    hidden = front(next(batches()))
    cut = hidden.detach().requires_grad_()
    with amp.scale_loss(loss_of(back(cut)), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert cut.grad is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hidden.backward(cut.grad / SCALE if is_divided else cut.grad)
    told = [one for one in caught if "stay multiplied by the loss scale" in str(one.message)]
    assert [one.filename for one in told] == [__file__] * (not is_divided)
