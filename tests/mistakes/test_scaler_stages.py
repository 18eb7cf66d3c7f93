"""Which calls of a served GradScaler are refused, and what it notes of them: as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import trains
from torch import nn
from training import loss_of, make, prepared, weights

from amp_patch import amp as core

INF = float("inf")
OPTIONS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2, "backoff_factor": 0.25}


class Cycle(NamedTuple):
    """What a script does until it updates the scale, or to the next cycle where it does not.

    Attributes:
        factors: of the losses of two optimizers.
        unscales, steps: how often each is unscaled, and stepped after that.
        update: whether the scale is updated.
    """

    factors: tuple[float, float]
    unscales: tuple[int, int]
    steps: tuple[int, int]
    update: bool


def pairs(*values: Any) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.tuples(st.sampled_from(values), st.sampled_from(values))


CYCLES = st.builds(
    Cycle, pairs(1.0, 1.0, INF), pairs(0, 1, 1, 2), pairs(1, 1, 2), st.sampled_from((True, False))
)


def trained(
    cycles: list[Cycle], prepare: Callable[[list[nn.Module], list[Any]], object]
) -> list[Any]:
    """Return which calls raised, the scaler's answers after each update, and the weights."""
    made = [make(), make()]
    models, optimizers = [model for model, _ in made], [optimizer for _, optimizer in made]
    prepare(models, optimizers)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    noted: list[Any] = []
    for cycle in cycles:
        for model, optimizer, factor in zip(models, optimizers, cycle.factors, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, torch.ones(2, 4)) * factor).backward()
        for optimizer, unscales, steps in zip(optimizers, *cycle[1:3], strict=True):
            for call in (*[scaler.unscale_] * unscales, *[scaler.step] * steps):
                noted.append(raised(call, optimizer))
            found = scaler._found_inf_per_device(optimizer)
            noted.append({device: flag.item() for device, flag in found.items()})
        if cycle.update:
            scaler.update()
            noted += [scaler.get_scale(), scaler.state_dict()]
    return [*noted, *(param.detach().tolist() for model in models for param in model.parameters())]


def raised(call: Callable[[Any], object], optimizer: Any) -> str:
    """Return the beginning of what a call is refused with; "" where it is not."""
    try:
        call(optimizer)
    except RuntimeError as error:
        return str(error).partition(";")[0].rstrip(".")
    return ""


def prepare(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Prepare them so that nothing but the scale differs from torch."""
    options: dict[str, Any] = {"opt_level": "O0", "loss_scale": "dynamic", "verbosity": 0}
    core.initialize(models, optimizers, **options)


@trains()
@given(st.lists(CYCLES, min_size=1, max_size=4))
def test_drawn_calls_do_what_they_do_in_torch(cycles: list[Cycle]) -> None:
    expected = trained(cycles, lambda models, optimizers: None)
    try:
        assert trained(cycles, prepare) == expected
    finally:
        core.deactivate()


ORDERS = {
    "unscale_, unscale_": r"unscale_\(\) has already been called on this optimizer since",
    "step, unscale_": r"unscale_\(\) is being called after step\(\)",
    "step, step": r"step\(\) has already been called since the last update",
    "unscale_, step, step": r"step\(\) has already been called since the last update",
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("order", ORDERS)
def test_calls_in_another_order_are_refused_and_change_nothing(
    amp: ModuleType, order: str, level: str
) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, torch.ones(2, 4))).backward()
    *calls, last = order.split(", ")
    for call in calls:
        getattr(scaler, call)(optimizer)
    before = weights(model), scaler.get_scale()
    with pytest.raises(RuntimeError, match=ORDERS[order]):
        getattr(scaler, last)(optimizer)
    assert (scaler.get_scale(), all(map(torch.equal, weights(model), before[0]))) == (
        before[1],
        True,
    )
    scaler.update()
    scaler.unscale_(optimizer)  # a new cycle


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_that_is_disabled_takes_calls_in_any_order(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, torch.ones(2, 4))).backward()
        for call in ("unscale_", "unscale_", "step", "unscale_"):
            getattr(scaler, call)(optimizer)
    scaler.update()
    assert vars(scaler) == vars(torch.amp.GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("factor", [1.0, INF])
def test_it_is_noted_whether_a_step_is_skipped(amp: ModuleType, level: str, factor: float) -> None:
    """At O5 the scale is 1, and no step is."""
    model, optimizer = prepared(amp, level)
    other, others = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, torch.ones(2, 4)) * factor).backward()
    scaler.scale(loss_of(other, torch.ones(2, 4)) * factor).backward()
    for one, is_found in ((optimizer, level != "O5"), (others, True)):
        scaler.unscale_(one)
        found = scaler._found_inf_per_device(one)
        is_found = is_found and factor == INF
        assert {key: flag.item() for key, flag in found.items()} == {torch.device("cpu"): is_found}
    scaler.step(optimizer)
    scaler.update()
    assert scaler._found_inf_per_device(optimizer) == {}


def test_two_scalers_note_their_own(amp: ModuleType) -> None:
    (one, first), (two, second) = make(), make()
    amp.initialize([one, two], [first, second], opt_level="O1", verbosity=0)
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    for model, optimizer, scaler in ((one, first, scalers[0]), (two, second, scalers[1])):
        scaler.scale(loss_of(model, torch.ones(2, 4))).backward()
        scaler.unscale_(optimizer)
    scalers[0].step(first)
    scalers[0].update()
    with pytest.raises(RuntimeError, match="already been called"):
        scalers[1].unscale_(second)


def test_a_step_that_raised_may_be_made_again(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, torch.ones(2, 4))).backward()

    def fail(*_: object) -> None:
        raise OSError("no")

    before, hook = weights(model), optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no"):
        scaler.step(optimizer)
    hook.remove()
    scaler.step(optimizer)
    assert not any(map(torch.equal, weights(model), before))


def test_a_closure_is_refused_before_anything_is_unscaled(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, torch.ones(2, 4))).backward()
    with pytest.raises(RuntimeError, match="takes no closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("factor", [1.0, INF])
def test_what_a_block_found_is_noted(amp: ModuleType, factor: float) -> None:
    model, optimizer = prepared(amp, "O2")
    scaler = torch.amp.GradScaler("cpu")
    with amp.scale_loss(loss_of(model, torch.ones(2, 4)) * factor, optimizer) as scaled_loss:
        scaler.scale(scaled_loss).backward()
    scaler.unscale_(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    assert flag.item() == (factor == INF)
