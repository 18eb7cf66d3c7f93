"""Optimizers that ``initialize`` never got, or that belong to something else."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import threading
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from training import (
    LEVELS,
    assert_equal,
    batches,
    loss_of,
    make,
    prepared,
    trained_rightly,
    weights,
)

import amp_patch
from amp_patch.session import session

SCALED = ("O1", "O2")
NEVER_GOT = re.escape(
    "got a step of an optimizer of type SGD that amp.initialize() never got, with 2 gradients"
)


def other_half(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.last.parameters(), lr=0.05)


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("made", ["before", "after", "after unfreezing"])
@pytest.mark.parametrize("scaled_by", ["scale_loss", "GradScaler", "delay_unscale"])
def test_an_optimizer_of_a_part_of_the_model_is_refused(
    amp: ModuleType, level: str, made: str, scaled_by: str
) -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    other = other_half(model)
    model.last.requires_grad_(made != "after unfreezing")
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.last.requires_grad_()
    if made != "before":
        other = other_half(model)
    before = weights(model)
    inputs = next(batches())
    if scaled_by == "GradScaler":
        torch.amp.GradScaler("cpu").scale(loss_of(model, inputs)).backward()
    else:
        delayed = scaled_by == "delay_unscale"
        with amp.scale_loss(loss_of(model, inputs), optimizer, delay_unscale=delayed) as scaled:
            scaled.backward()
    with pytest.raises(RuntimeError, match=NEVER_GOT) as error:
        other.step()
    assert "call amp.initialize(model, [optimizer, other_optimizer])" in str(error.value)
    assert_equal(weights(model), before)


@pytest.mark.parametrize("level", SCALED)
def test_an_optimizer_of_the_whole_model_is_refused(amp: ModuleType, level: str) -> None:
    model, _ = make()
    nothing = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.first.parameters(), nothing], lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match=r"of type SGD that amp\.initialize\(\)"):
        other.step()


@pytest.mark.parametrize("level", SCALED)
def test_an_optimizer_of_another_model_is_refused_at_its_first_step(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    head = nn.Linear(2, 2)
    other = torch.optim.SGD(head.parameters(), lr=0.05)
    before = weights(head)
    with amp.scale_loss(head(model(next(batches()))).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match=NEVER_GOT):
        other.step()
    assert_equal(weights(head), before)


class Doubled(torch.autograd.Function):
    """Keeps something by the name that nodes of leaves have their leaf by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = "x"
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_loss_may_come_through_any_function_of_the_users_own(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    with amp.scale_loss(Doubled.apply(model(next(batches()))).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("level", SCALED)
def test_one_that_only_later_losses_reach_is_refused_from_its_second_step_on(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    for inputs in [*batches()] * 2:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    head = nn.Linear(2, 2)
    other = torch.optim.SGD(head.parameters(), lr=0.05)
    for step, inputs in enumerate(batches()):
        with amp.scale_loss(head(model(inputs)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        before = weights(head)
        with pytest.raises(RuntimeError, match=NEVER_GOT) if step else contextlib.nullcontext():
            other.step()
        assert step == 0 or all(map(torch.equal, before, weights(head)))


def own_loss(head: nn.Module) -> None:
    with amp_patch.amp.disable_casts():
        head(torch.ones(1, 2)).square().mean().backward()


def own_loss_in_a_thread(head: nn.Module) -> None:
    thread = threading.Thread(target=own_loss, args=(head,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("when", ["before", "inside", "inside, by a thread", "after", "reached"])
def test_an_optimizer_of_another_model_steps_by_its_own_loss(
    amp: ModuleType, level: str, when: str
) -> None:
    (model, optimizer), head = prepared(amp, level), nn.Linear(2, 2)
    by_hand = copy.deepcopy(head)
    others = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (head, by_hand)]
    inside = {"inside": own_loss, "inside, by a thread": own_loss_in_a_thread}.get(when)
    for inputs in batches():
        others[0].zero_grad(set_to_none=False)
        if when == "before":
            own_loss(head)
        outputs = head(model(inputs)) if when == "reached" else model(inputs)
        with amp.scale_loss(outputs.float().square().mean(), optimizer) as scaled_loss:
            if inside is not None:
                inside(head)
            scaled_loss.backward()
        if when in ("after", "reached"):
            others[0].zero_grad(set_to_none=False)
            own_loss(head)
        own_loss(by_hand)
        for other in others:
            other.step()
        others[1].zero_grad()
    assert_equal(weights(head), weights(by_hand))


@pytest.mark.parametrize("level", SCALED)
def test_gradients_that_a_script_unscales_in_place_are_stepped(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    noise = nn.Parameter(torch.zeros(4))
    other = torch.optim.SGD([noise], lr=0.5, maximize=True)
    for inputs in batches():
        optimizer.zero_grad()
        other.zero_grad()
        with amp.scale_loss(loss_of(model, inputs + noise), optimizer) as scaled_loss:
            scaled_loss.backward()
        noise.grad.sign_()
        before = noise.detach().clone()
        other.step()
        optimizer.step()
        assert (noise - before).abs().tolist() == [0.5] * 4


@pytest.mark.parametrize("level", SCALED)
def test_what_no_optimizer_steps_is_not_clipped_with_the_rest(amp: ModuleType, level: str) -> None:
    """The norm would be that of its scaled gradients, and the update of the others next to none."""
    model, _ = make()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="got 2 of parameters that no optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_norm_(model.last.parameters(), 1.0)
    model.first.requires_grad_(False)
    model.zero_grad()
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1.0
    optimizer.step()


@pytest.mark.parametrize("level", SCALED)
def test_what_is_unfrozen_from_the_start_is_counted_once(amp: ModuleType, level: str) -> None:
    model, _ = make()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    model.first.requires_grad_(True)
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="got 2 of parameters that no optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("level", SCALED)
def test_what_is_unfrozen_is_clipped_with_the_rest_if_an_optimizer_steps_it(
    amp: ModuleType, level: str, is_added: bool
) -> None:
    model, _ = make()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    for inputs in [*batches()] * 2:
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.first.requires_grad_(True)
    if is_added:
        optimizer.add_param_group({"params": list(model.first.parameters())})
    refused = pytest.raises(RuntimeError, match="got 2 of parameters that no optimizer")
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    with contextlib.nullcontext() if is_added else refused:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("level", SCALED)
def test_what_an_optimizer_is_given_later_is_clipped_with_the_rest(
    amp: ModuleType, level: str
) -> None:
    """It was in no optimizer, and not frozen, when `initialize` looked."""
    model, _ = make()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=64.0)
    optimizer.add_param_group({"params": list(model.first.parameters())})
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test_nothing_is_kept_of_optimizers_that_live_for_a_step(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    for inputs in batches():
        noise = torch.zeros_like(inputs, requires_grad=True)
        loss_of(model, inputs + noise).backward()
        torch.optim.SGD([noise], lr=0.1).step()
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        del noise
    with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert not session.guard.unprepared


def test_cleared_and_unscaled_gradients_are_stepped(amp: ModuleType) -> None:
    expected = trained_rightly("O1")
    model, _ = make()
    first = torch.optim.SGD(model.first.parameters(), lr=0.05)
    amp.initialize(model, first, opt_level="O1", verbosity=0)
    other = other_half(model)
    inputs = next(batches())
    with amp.scale_loss(loss_of(model, inputs), first) as scaled_loss:
        scaled_loss.backward()
    for inputs in batches():
        model.zero_grad()
        loss_of(model, inputs).backward()
        other.step()
        first.step()
    torch.testing.assert_close(weights(model), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_model_is_told_of(amp: ModuleType, level: str) -> None:
    model, optimizer = make()
    with pytest.warns(UserWarning, match="of which none is of these models") as caught:
        amp.initialize(copy.deepcopy(model), optimizer, opt_level=level, verbosity=0)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_of_models_that_came_before_are_not_told_of(amp: ModuleType, level: str) -> None:
    (one, first), (two, second) = make(), make()
    amp.initialize(one, opt_level=level, verbosity=0)
    amp.initialize(two, [first, second], opt_level=level, verbosity=0)
    loss = nn.Parameter(torch.ones(1))
    amp.initialize([], torch.optim.SGD([loss], lr=0.1), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_the_weights_of_losses_is_not_told_of(amp: ModuleType, level: str) -> None:
    model, optimizer = make()
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    amp.initialize(model, [optimizer, other], opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_one_beside_those_that_train_all_of_the_model_is_not_told_of(
    amp: ModuleType, level: str
) -> None:
    model, optimizer = make()
    centers = torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.5)
    amp.initialize(model, [optimizer, centers], opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_one_of_an_image_beside_a_frozen_model_is_not_told_of(amp: ModuleType, level: str) -> None:
    model, _ = make()
    image = torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.5)
    amp.initialize(model.requires_grad_(False), image, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_one_of_a_vector_that_the_parameters_are_views_of_is_refused(
    amp: ModuleType, level: str
) -> None:
    model, _ = make()
    flat = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach())
    nn.utils.vector_to_parameters(flat, model.parameters())
    dtypes = [param.dtype for param in model.parameters()]
    with pytest.raises(RuntimeError, match=f"{flat.numel()} elements in whose memory 4 of these"):
        amp.initialize(model, torch.optim.SGD([flat], lr=0.1), opt_level=level, verbosity=0)
    assert [param.dtype for param in model.parameters()] == dtypes


def test_other_parameters_may_lie_beside_the_models_in_one_vector(amp: ModuleType) -> None:
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    flat = nn.utils.parameters_to_vector(both.parameters()).detach()
    nn.utils.vector_to_parameters(flat, both.parameters())
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    amp.initialize(both[0], optimizer, opt_level="O1", verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_forgotten_scale_loss_is_told_of_once(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs in batches():
            optimizer.zero_grad()
            loss_of(model, inputs).backward()
            optimizer.step()
    told = ["at a level with a loss scale"] if level in SCALED else []
    assert [str(one.message)[:28] for one in caught] == told
    assert {one.filename for one in caught} <= {__file__}


class Twice(torch.optim.SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.parametrize("is_forgotten", [False, True])
@pytest.mark.parametrize("level", SCALED)
def test_one_that_is_forgotten_in_a_closure_is_told_of_once(
    amp: ModuleType, level: str, is_forgotten: bool
) -> None:
    model, optimizer = amp.initialize(*make(Twice), opt_level=level, verbosity=0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, next(batches()))
        if is_forgotten:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step(closure)
    told = ["at a level with a loss scale"] if is_forgotten else []
    assert [str(one.message)[:28] for one in caught] == told
    assert {one.filename for one in caught} <= {__file__}


@pytest.mark.parametrize("options", [{"loss_scale": 1.0}, {"opt_level": "O0"}, {"opt_level": "O3"}])
def test_without_a_loss_scale_nothing_is_forgotten(amp: ModuleType, options: dict) -> None:
    model, optimizer = prepared(amp, **{"level": "O1", **options})
    loss_of(model, next(batches())).backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["assigned", "rebuilt"])
def test_groups_that_a_script_fills_with_the_models_parameters(
    amp: ModuleType, level: str, how: str
) -> None:
    expected = trained_rightly(level)
    model, optimizer = prepared(amp, level)
    params = list(model.parameters())
    if how == "assigned":
        optimizer.param_groups[0]["params"] = params
    else:
        first = optimizer.param_groups[0]
        optimizer.param_groups = [{**first, "params": params[:1]}, {**first, "params": params[1:]}]
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert_equal(weights(model), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "trained", ["a new parameter", "an unfrozen layer", "a layer before the training"]
)
def test_a_plain_backward_outside_of_the_training_steps_what_it_reaches(
    amp: ModuleType, level: str, trained: str
) -> None:
    """As an explainer of a graph network's predictions does, or another stage."""
    model, _ = make()
    model.last.requires_grad_(False)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if trained != "a layer before the training":
        with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    if trained == "a new parameter":
        model.first.mask = nn.Parameter(torch.ones(4))
        params = [model.first.mask]
    else:
        params = list(model.last.requires_grad_().parameters())
    other = torch.optim.SGD(params, lr=0.05)
    inputs = next(batches())
    loss_of(model, inputs * model.first.mask if len(params) == 1 else inputs).backward()
    before = [param.detach().clone() for param in params]
    with warnings.catch_warnings():
        # that it steps half weights without masters is told of, rightly
        warnings.filterwarnings("ignore", "This SGD steps 2 parameters")
        other.step()
    assert not any(map(torch.equal, before, params))


@pytest.mark.parametrize(
    "alone", [torch.zeros(3, requires_grad=True), nn.Parameter(torch.zeros(1))], ids=["leaf", "one"]
)
def test_what_is_trained_beside_the_model_is_not_told_of(
    amp: ModuleType, alone: torch.Tensor
) -> None:
    model, optimizer = make()
    temperature = torch.optim.Adam([alone])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(model, [optimizer, temperature], opt_level="O1", verbosity=0)
    assert not caught


@pytest.mark.parametrize("level", SCALED)
def test_what_was_watched_of_dropped_copies_goes(amp: ModuleType, level: str) -> None:
    """As where each step trains a copy for itself: Reptile, a part of federated averaging."""
    model, optimizer = prepared(amp, level)
    inputs = next(batches())
    counts = []
    for _ in range(4):
        copied = copy.deepcopy(model)
        inner = torch.optim.SGD(copied.parameters(), lr=0.01)
        loss_of(copied, inputs).backward()
        inner.step()
        del copied, inner
        gc.collect()  # a copy is in a circle with its own forward
        counts.append(len(session.guard.unprepared._params))
    assert counts[1:] == counts[:-1]


GONE = "steps 4 fp32 masters of an optimizer that amp.initialize() returned and that is gone"


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    "made",
    [
        lambda groups: torch.optim.SGD(groups, lr=0.05),
        lambda groups: torch.optim.AdamW(groups, lr=0.05),
        lambda groups: torch.optim.RMSprop([one for group in groups for one in group["params"]]),
    ],
)
def test_an_optimizer_that_takes_the_place_of_its_masters_own_is_told_of_once(
    amp: ModuleType, level: str, made: Any
) -> None:
    """By plain backwards, which no scale_loss() refuses; the call that it names trains."""
    model, optimizer = make(torch.optim.SGD)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer = made(optimizer.param_groups)
    gc.collect()
    before = weights(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for inputs, _ in zip(batches(), range(3), strict=False):
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [str(one.message) for one in told if GONE in str(one.message)]
    assert len(found) == 1
    assert f"This {type(optimizer).__name__} {GONE}" in found[0]
    assert found[0].endswith("opt_level=...) anew, with every optimizer of the model.")
    assert_equal(weights(model), before)
    amp_patch.amp.deactivate()  # as it says
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(loss_of(model, next(batches())), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert not torch.equal(weights(model)[0], before[0])


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("goes", [False, True])
def test_another_of_the_masters_steps_them_without_a_word_while_their_own_lives(
    amp: ModuleType, level: str, goes: bool
) -> None:
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    other = torch.optim.SGD(optimizer.param_groups, lr=0.05)

    def step() -> None:
        loss_of(model, next(batches())).backward()
        other.step()
        other.zero_grad()

    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        loss_of(model, next(batches()))
    assert not torch.equal(weights(model)[0], before[0])
    if goes:
        del optimizer
        gc.collect()
        with pytest.warns(UserWarning, match=re.escape(GONE)):
            step()
