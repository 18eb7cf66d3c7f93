"""A mend is tried out: where half rounds gradients off, and float32 mends a forward alone."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from plants import WIDTH, around, prepared, square, the_cause, train
from torch import Tensor, nn

LEVELS = ("O1", "O2", "O3")


class OneLess(nn.Module):
    """Half rounds 1 - sigmoid(x) to 0, where the backward of log divides by next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return -torch.log(1 - torch.sigmoid(self.proj(x) + 9) + 1e-7)


class Normalized(nn.Module):
    """A row of 0 over its norm: half rounds the epsilon to 0, and the root of 0 has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (torch.arange(len(x)) % 2).to(x.dtype)[:, None]
        return x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-8)


class Bounded(Normalized):
    """The same with its epsilon in the root, which float32 holds: a backward that it mends."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (torch.arange(len(x)) % 2).to(x.dtype)[:, None]
        return x / (x.square().sum(-1, keepdim=True) + 1e-16).sqrt()


class Steep(nn.Module):
    """Numbers beyond half, whose gradients half weights hold if the loss's are small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * 30000.0 * 30000.0


class Amplified(nn.Module):
    """Gradients that are large inside, and right at a scale that fits."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 0.001 * 1000.0)


def small(outputs: Tensor) -> Tensor:
    return square(outputs) * 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_half_rounds_far_off_are_not_blamed_on_the_loss_scale(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, around(OneLess()), level, loss_scale=65536.0)
    train(amp, model, optimizer, small)
    cause = the_cause(amp)
    assert not cause.is_loss_scale
    assert cause.rule == {"1.1": "float"}
    assert cause.off_at is not None
    assert f"A loss scale of {cause.off_at:g} is no overflow, but half" in cause.advice()
    amp.deactivate()
    # what is said of the scale is so, and so is what is said of the rule
    for options in ({"loss_scale": cause.off_at}, {"rules": {"modules": cause.rule}}):
        torch.manual_seed(0)
        options = {"loss_scale": 65536.0, **options}
        model, optimizer = prepared(amp, around(OneLess()), level, **options)
        train(amp, model, optimizer, small)
        assert not amp.step_was_skipped(optimizer)
        amp.deactivate()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_that_are_right_at_a_smaller_scale_need_no_float32(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, around(Amplified()), level, loss_scale=65536.0)
    train(amp, model, optimizer, lambda outputs: square(outputs) * 0.1)
    cause = the_cause(amp)
    assert (cause.module, cause.is_loss_scale, cause.off_at) == ("1.1", True, None)
    amp.deactivate()
    rules = {"modules": {"1.1": "float"}}  # which would do as well
    model, optimizer = prepared(amp, around(Amplified()), level, loss_scale=65536.0, rules=rules)
    train(amp, model, optimizer, lambda outputs: square(outputs) * 0.1)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O2", "O3"])  # O1 squares in float32
@pytest.mark.parametrize("plant", [Normalized, Bounded])
def test_a_backward_that_float32_does_not_mend_is_told_of_with_the_forward(
    amp: ModuleType, level: str, plant: type[nn.Module]
) -> None:
    model, optimizer = prepared(amp, around(plant()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.rule) == ("forward", "div", {"1.1": "float"})
    told = "That mends the forward alone: the backward of `sqrt` is NaN in float32, too"
    assert (told in str(cause)) is (plant is Normalized)
    amp.deactivate()
    model, optimizer = prepared(amp, around(plant()), level, rules={"modules": cause.rule})
    train(amp, model, optimizer)
    assert amp.step_was_skipped(optimizer) is (plant is Normalized)


class Wide(nn.Module):
    """Gradients that are 4096 times as large inside as they are outside."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0**-12 * 2.0**12


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("factors", [(1e2, 6e4, 1e2), (6e4, 1e2, 1e2), (6e4, 1e2, 6e4)])
def test_what_mends_most_steps_is_told_with_its_rule(
    amp: ModuleType, level: str, factors: tuple[float, ...]
) -> None:
    def skips(rules: dict[str, str]) -> list[bool]:
        torch.manual_seed(0)
        options = {"loss_scale": 2.0, "rules": {"modules": rules}}
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Wide())
        model, optimizer = prepared(amp, net, level, **options)
        found = []
        for factor in factors:
            train(amp, model, optimizer, lambda one, f=factor: one.float().sum() * f / 2)
            found.append(bool(amp.step_was_skipped(optimizer)))
        return found

    assert skips({}) == [True] * 3
    cause = the_cause(amp)
    assert (cause.operator, cause.mended_by, cause.steps) == ("mul", "level", 3)
    amp.deactivate()
    mended = skips({"1": "float"}).count(False)
    assert mended == factors.count(1e2)
    words = f"In {mended} of 3 steps `1` in float32 is enough. In the others: float16 cannot hold"
    assert cause.advice().startswith(words) is (mended == 2)
    assert cause.rule == ({"1": "float"} if mended == 2 else {})


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("factor", [1e-6, 1.0])
def test_the_mend_of_a_forward_is_tried_with_the_gradients_of_the_loss(
    amp: ModuleType, level: str, factor: float
) -> None:
    def loss(outputs: Tensor) -> Tensor:
        return outputs.float().mean() * factor

    def gradients_at(level: str, rules: dict[str, str]) -> list[Tensor]:
        torch.manual_seed(0)
        options = {"loss_scale": 1.0, "rules": {"modules": rules}}
        model, optimizer = prepared(amp, nn.Sequential(Steep(), nn.Identity()), level, **options)
        train(amp, model, optimizer, loss)
        found = [param.grad for param in model.parameters()]
        amp.deactivate()
        return found

    fits = all(one.isfinite().all() for one in gradients_at(level, {"0": "float"}))
    assert fits is (factor < 1.0)
    assert all(one.isfinite().all() for one in gradients_at("O5", {}))
    model, optimizer = prepared(amp, nn.Sequential(Steep(), nn.Identity()), level)
    train(amp, model, optimizer, loss)
    cause = the_cause(amp)
    assert (cause.where, cause.rule) == ("forward", {"0": "float"} if fits else {})
    assert "That mends the forward alone" not in str(cause)
    assert ("float16 cannot hold the gradients that this loss has" in str(cause)) is not fits
    assert ("take O5: bfloat16 has the range" in cause.advice()) is not fits


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_backward_that_was_not_tried_is_said_to_be_so(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, nn.Sequential(Steep(), nn.Identity()), level)
    train(amp, model, optimizer)  # of a square: its gradients are inf, too
    cause = the_cause(amp)
    assert cause.rule == {"0": "float"}
    assert "Its backward was not tried" in str(cause)
    assert "take O5 next" in str(cause)
