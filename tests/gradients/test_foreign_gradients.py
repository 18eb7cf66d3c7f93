"""Gradients that another optimizer's scaled loss wrote are told, and not stepped."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from amp_patch.gradients.foreign_gradients import ForeignGradients

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Pair(nn.Module):
    """Two layers, one after the other, for two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x))
        return outputs


def prepared(
    amp: ModuleType, level: str, loss_scale: Any = 64.0
) -> tuple[Pair, Optimizer, Optimizer]:
    model = Pair()
    optimizers = [SGD(part.parameters(), lr=0.5) for part in (model.first, model.second)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0)
    return model, *optimizers


def loss_of(model: nn.Module) -> Tensor:
    return model(X).float().square().mean()


def values(optimizer: Optimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.filterwarnings("ignore:at a level with a loss scale every loss")
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_the_script_gives_in_their_place_are_stepped(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    before = values(second)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    for param in amp.master_params(second):
        param.grad = torch.ones_like(param)
    first.step()
    second.step()
    expected = [value - 0.5 for value in before]
    torch.testing.assert_close(values(second), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("caller", ["step", "clip_grad_norm_"])
def test_gradients_that_nobody_unscales_are_refused(
    amp: ModuleType, level: str, caller: str
) -> None:
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    first.step()
    before = values(second)
    with pytest.raises(RuntimeError, match=r"got 2 that the backward\(\).*\[optimizer, other"):
        second.step() if caller == "step" else amp.clip_grad_norm_(second, 1.0)
    assert all(map(torch.equal, before, values(second)))


@pytest.mark.parametrize("level", LEVELS)
def test_they_are_refused_though_the_script_has_looked_at_masters(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    before = values(second)
    for _ in range(2):
        with amp.scale_loss(loss_of(model), first) as scaled_loss:
            scaled_loss.backward()
        amp.master_params(second)
    with pytest.raises(RuntimeError, match="got 2 that the"):
        second.step()
    torch.testing.assert_close(values(second), before, rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_an_own_pass_behind_them_makes_them_no_better(amp: ModuleType, level: str) -> None:
    model, first, second = prepared(amp, level)
    for optimizer in (first, second):
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
    before = values(second)
    with pytest.raises(RuntimeError, match=r"got 2 that the backward\(\).*\[optimizer, other"):
        second.step()
    assert all(map(torch.equal, before, values(second)))
    second.zero_grad()
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    second.step()
    assert not any(map(torch.equal, before, values(second)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_the_block_that_clears_them_first_trains(amp: ModuleType, level: str, clear: str) -> None:
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    before = values(second)
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        CLEARED[clear](model, second)
        scaled_loss.backward()
    second.step()
    assert not any(map(torch.equal, before, values(second)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_may_clear_them(amp: ModuleType, level: str, clears: bool) -> None:
    """It does so within the step, which changes nothing if they are there still."""
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    before, grads = values(second), []

    def closure() -> Tensor:
        if clears:
            second.zero_grad()
        loss = loss_of(model)
        with amp.scale_loss(loss, second) as scaled_loss:
            scaled_loss.backward()
        if clears:
            grads[:] = [param.grad.float() for param in amp.master_params(second)]
        return loss

    if clears:
        second.step(closure)
        expected = [value - 0.5 * grad for value, grad in zip(before, grads, strict=True)]
        found = [value.float() for value in values(second)]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    else:
        with pytest.raises(RuntimeError, match=r"optimizer.step\(closure\) needs unscaled"):
            second.step(closure)
        assert all(map(torch.equal, before, values(second)))


CLEARED: dict[str, Callable[[Pair, Optimizer], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.second.zero_grad(),
    "model to zero": lambda model, optimizer: model.second.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clear", CLEARED)
def test_once_they_are_cleared_the_optimizer_trains(
    amp: ModuleType, level: str, clear: str
) -> None:
    model, first, second = prepared(amp, level)
    alone = [g.float() for g in torch.autograd.grad(loss_of(model), [*model.second.parameters()])]
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    CLEARED[clear](model, second)
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    got = [param.grad.float() for param in amp.master_params(second)]
    torch.testing.assert_close(got, alone, rtol=1e-2, atol=1e-3)
    second.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_block_for_both_and_blocks_in_turn_are_right(amp: ModuleType, level: str) -> None:
    model, first, second = prepared(amp, level)
    for optimizers in ([first, second], [first], [second]):
        for optimizer in (first, second):
            optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_parameter_of_both_is_unscaled_for_both(amp: ModuleType, level: str) -> None:
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    first, second = (SGD(model.parameters(), lr=0.5) for _ in range(2))
    amp.initialize(model, [first, second], opt_level=level, loss_scale=64.0, verbosity=0)
    loss_of(plain).backward()
    before = plain.weight.detach().clone()
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad.float(), plain.weight.grad, rtol=2e-2, atol=1e-2)
    first.step()
    once = before - 0.5 * plain.weight.grad
    torch.testing.assert_close(model.state_dict()["weight"].float(), once, rtol=2e-2, atol=2e-2)
    second.step()  # with the same gradient, or none where the first step has dropped it
    moved = (model.state_dict()["weight"].float() - once).norm() / plain.weight.grad.norm()
    assert min(abs(moved), abs(moved - 0.5)) < 0.05


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_master_has_received_counts_though_another_loss_came_after(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    expected = [p - 0.5 * p.grad for p in amp.master_params(second)]
    first.zero_grad()
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(UserWarning, match="has no effect"):
        second.step()
    torch.testing.assert_close(values(second), [p.detach() for p in expected])


def clear(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def replace(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad * 1.5


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("has_plain_backward", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [(clear, None), (replace, None), (None, replace)],
    ids=["cleared before", "replaced before", "replaced after"],
)
def test_scaled_ones_in_the_place_of_what_a_master_has_received_are_not_stepped(
    amp: ModuleType,
    before: Callable[[list[nn.Parameter]], None] | None,
    after: Callable[[list[nn.Parameter]], None] | None,
    has_plain_backward: bool,
) -> None:
    model, first, second = prepared(amp, "O2")
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    masters = [param for group in second.param_groups for param in group["params"]]
    expected = [p.detach() - 0.5 * p.grad for p in masters]
    first.zero_grad()
    if before is not None:
        before(list(model.second.parameters()))
    with amp.scale_loss(3 * loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    if after is not None:
        after(list(model.second.parameters()))
    first.step()

    def go_on() -> None:
        if has_plain_backward:
            first.zero_grad()
            model.first(X.half()).float().sum().backward()
        second.step()

    with pytest.warns(UserWarning, match="has no effect"):
        go_on()
    torch.testing.assert_close(values(second), expected)


@pytest.mark.filterwarnings("ignore:gradients that are to be differentiated again")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_sum_with_a_graph_that_anothers_block_makes_is_not_stepped(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    expected = [p.detach() - 0.5 * p.grad for p in amp.master_params(second)]
    with amp.scale_loss(3 * loss_of(model), first) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    with pytest.warns(UserWarning, match="has no effect"):
        second.step()
    torch.testing.assert_close(values(second), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
def test_zeros_of_the_optimizer_may_be_added_to_outside_of_a_block(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    second.zero_grad(set_to_none=False)
    loss_of(model).backward()
    before = values(second)
    second.step()
    assert not any(map(torch.equal, before, values(second)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_sixteenth_block_is_watched_still(amp: ModuleType, level: str) -> None:
    model, *both = prepared(amp, level)
    for _ in range(15):
        with amp.scale_loss(loss_of(model), both) as scaled_loss:
            scaled_loss.backward()
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="another one"), amp.scale_loss(loss, both):
        loss.backward()


class Blocks(nn.Module):
    """A layer, and two after it that another optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(x))
        return outputs


def reached(amp: ModuleType, level: str) -> tuple[Blocks, Optimizer]:
    """Return a model and its second optimizer, whose layers a scaled loss of the first reached."""
    model = Blocks()
    first, second = (SGD(part.parameters(), lr=0.5) for part in (model.first, model.second))
    amp.initialize(model, [first, second], opt_level=level, loss_scale=64.0, verbosity=0)
    with amp.scale_loss(loss_of(model), first) as scaled_loss:
        scaled_loss.backward()
    first.step()
    first.zero_grad()
    return model, second


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_those_of_one_layer_are_refused_after_another_was_cleared(
    amp: ModuleType, level: str
) -> None:
    model, second = reached(amp, level)
    model.second[0].zero_grad()
    before = values(second)
    with pytest.raises(RuntimeError, match=r"got 2 that the backward\(\)"):
        second.step()
    assert all(map(torch.equal, before, values(second)))


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_backward_of_its_own_counts_after_they_were_cleared_by_hand(
    amp: ModuleType, level: str
) -> None:
    model, second = reached(amp, level)
    for param in model.second.parameters():
        param.grad = None
    loss_of(model).backward()
    before = values(second)
    second.step()
    assert not any(map(torch.equal, before, values(second)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_those_that_its_own_block_took_over_may_be_dropped_by_hand(
    amp: ModuleType, level: str
) -> None:
    model, first, second = prepared(amp, level)
    for optimizer in (first, second):
        with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
            scaled_loss.backward()
        if optimizer is first:
            first.step()
            first.zero_grad()
    for param in (*model.second.parameters(), *amp.master_params(second)):
        param.grad = None
    before = values(second)
    with amp.scale_loss(loss_of(model), second) as scaled_loss:
        scaled_loss.backward()
    second.step()
    assert not any(map(torch.equal, before, values(second)))


def test_parameters_that_leave_take_theirs_along() -> None:
    """But not one to which an own pass has added, nor another's."""
    leaving, mixed, staying = params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    foreign = ForeignGradients()
    watch = foreign.watch([mixed])
    mixed.grad = torch.ones(2)
    foreign.note(watch, [], 8.0)
    foreign.add_to()
    watch = foreign.watch([leaving, staying])
    leaving.grad, staying.grad = torch.ones(2), torch.ones(2)
    foreign.note(watch, [], 8.0)
    assert foreign.let_go([leaving, mixed]) == [(leaving, 8.0)]
    assert [foreign.scale_of(param) for param in params] == [None, 8.0, 8.0]
