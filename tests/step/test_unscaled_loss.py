"""The block of a loss that needs no scale and no masters: when there is one, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.scaled_loss import ScaledLoss
from amp_patch.step.unscaled_loss import UnscaledLoss

Prepared = tuple[nn.Module, Optimizer]


def prepared(amp: ModuleType, level: str, **options: Any) -> Prepared:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(1, 3)).float().sum()


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("O0", {}, UnscaledLoss),
        ("O3", {}, UnscaledLoss),
        ("O4", {}, UnscaledLoss),
        ("O1", {"loss_scale": 1.0}, UnscaledLoss),
        ("O1", {}, ScaledLoss),
        ("O2", {}, ScaledLoss),
        ("O5", {}, ScaledLoss),
        ("O4", {"loss_scale": 8.0}, ScaledLoss),
        ("O2", {"loss_scale": 1.0}, ScaledLoss),
    ],
)
def test_scales_and_masters_alone_need_a_backward_pass(
    amp: ModuleType, level: str, options: dict[str, Any], expected: type
) -> None:
    model, optimizer = prepared(amp, level, **options)
    assert type(amp.scale_loss(loss_of(model), optimizer)) is expected
    assert type(amp.scale_loss(loss_of(model), [optimizer])) is expected


def test_a_scale_of_one_that_may_grow_is_a_scale(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    session.scalers[0].scale = 1.0
    assert type(amp.scale_loss(loss_of(model), optimizer)) is ScaledLoss


@pytest.mark.parametrize("option", ["delay_unscale", "delay_overflow_check"])
def test_what_waits_for_later_has_a_backward_pass(amp: ModuleType, option: str) -> None:
    model, optimizer = prepared(amp, "O4")
    assert type(amp.scale_loss(loss_of(model), optimizer, **{option: True})) is ScaledLoss


@pytest.mark.parametrize(
    ("level", "expected"), [("O4", UnscaledLoss), ("O5", UnscaledLoss), ("O2", ScaledLoss)]
)
def test_a_second_optimizer_is_looked_after_where_its_losses_are_scaled(
    amp: ModuleType, level: str, expected: type
) -> None:
    model, optimizer = prepared(amp, "O4")
    _, second = prepared(amp, level)
    assert type(amp.scale_loss(loss_of(model), optimizer)) is expected
    both = UnscaledLoss if level == "O4" else ScaledLoss
    assert type(amp.scale_loss(loss_of(model), [optimizer, second])) is both


def test_half_gradients_that_wait_for_a_fused_step_are_unscaled_before_others_write(
    amp: ModuleType,
) -> None:
    model, optimizer = prepared(amp, "O4")
    large, x = nn.Linear(512, 512), torch.ones(1, 512)
    second, before = SGD(large.parameters(), lr=0.25), large.weight.detach().clone()
    amp.initialize(large, second, opt_level="O5", fused_step=True, verbosity=0)
    with amp.scale_loss(large(x).float().sum(), second) as scaled_loss:
        scaled_loss.backward()
    loss = loss_of(model) + large(x).float().sum()
    block = amp.scale_loss(loss, optimizer)
    assert type(block) is UnscaledLoss
    with block as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(UserWarning, match="has no effect"):
        second.step()
    assert torch.equal(large.state_dict()["weight"], before - 0.25)


@pytest.mark.parametrize(("level", "failed"), [("O4", "O5"), ("O1", "O1"), ("O2", "O5")])
def test_an_optimizer_whose_block_has_failed_hears_that_training_goes_on(
    amp: ModuleType, level: str, failed: str
) -> None:
    model, optimizer = prepared(amp, level)
    other, second = prepared(amp, failed)
    with pytest.raises(ArithmeticError), amp.scale_loss(loss_of(other), second) as scaled_loss:
        fails(scaled_loss)
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    second.step()  # else warns that it has no gradients


def test_parameters_that_nobody_steps_are_looked_after(amp: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = SGD(model[1].parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    assert type(amp.scale_loss(loss_of(model), optimizer)) is ScaledLoss


def test_an_observer_hears_of_the_loss(amp: ModuleType) -> None:
    class Listener(StepObserver):
        losses: list[tuple[Tensor, Any]] = []

        def scaled(self, loss: Tensor, scale: Any, *_: Any) -> None:
            self.losses.append((loss, scale))

    model, optimizer = prepared(amp, "O4")
    detach = session.observers.attach(Listener())
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    detach()
    assert Listener.losses == [(loss, 1.0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_half_loss_is_yielded_in_float32(amp: ModuleType, dtype: torch.dtype) -> None:
    _, optimizer = prepared(amp, "O4")
    loss = torch.full((2,), 1.5, dtype=dtype)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        assert (scaled_loss.dtype, scaled_loss.tolist()) == (wide, [1.5, 1.5])


def fails(scaled_loss: Tensor) -> None:
    scaled_loss.backward()
    raise ArithmeticError("in the block")


@pytest.mark.parametrize(
    ("end", "passes"), [(Tensor.backward, 1), (fails, 0)], ids=["it ends", "it fails"]
)
def test_the_next_forward_sees_what_was_written_and_the_pass_is_counted(
    amp: ModuleType, end: Callable[[Tensor], None], passes: int
) -> None:
    model, optimizer = prepared(amp, "O4")
    loss = loss_of(model)
    before = session.scalers[0].unskipped
    is_raised = pytest.raises(ArithmeticError) if end is fails else nullcontext()
    with is_raised, amp.scale_loss(loss, optimizer) as scaled_loss:
        model.weight.data.zero_()  # which moves no version
        end(scaled_loss)
    assert session.scalers[0].unskipped - before == passes
    assert torch.equal(model(torch.ones(1, 3)), model.bias.to(torch.bfloat16).expand(1, 2))


def test_a_look_up_on_the_block_names_the_with(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O4")
    with pytest.raises(AttributeError, match="as scaled_loss"):
        amp.scale_loss(loss_of(model), optimizer).backward()
