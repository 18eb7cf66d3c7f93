"""Observers hear of each event of a step, in order; nobody pays where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from test_scaled_loss import Weight, backward, prepared, train_step
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.session import session
from amp_patch.step.loss_scaling import Found
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

INF = float("inf")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


class Listener(StepObserver):
    """Notes every event, as plain values."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def scaled(
        self,
        loss: Tensor,
        scale: float | Tensor,
        scaler_id: int,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.events.append(("scaled", loss.item(), float(scale), scaler_id, len(optimizers)))

    def overflowed(self, scaler_id: int, found: Sequence[Found]) -> None:
        kinds = [check.nonfinite() for check, _ in found]
        self.events.append(("overflowed", scaler_id, session.scalers[scaler_id].scale, kinds))

    def clipped(self, optimizer: Optimizer, norm: Tensor) -> None:
        self.events.append(("clipped", norm.item()))

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        self.events.append(("stepped", skip.was_skipped))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    detach = session.observers.attach(listener)
    yield listener
    detach()


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_is_heard_of_in_its_order(amp, listener: Listener, level: str) -> None:
    model, optimizer = prepared(amp, level, 8.0)
    optimizer.zero_grad()
    scale = amp.loss_scale()
    backward(amp, model, optimizer, 3.0)
    amp.clip_grad_norm_(optimizer, 100.0)
    optimizer.step()
    norm = torch.tensor([3.0, 3.0, 1.0]).norm().item()
    assert [event[0] for event in listener.events] == ["scaled", "clipped", "stepped"]
    assert listener.events[0] == ("scaled", 0.0, scale, 0, 1)
    assert listener.events[1][1] == pytest.approx(norm, rel=1e-3)
    assert listener.events[2] == ("stepped", False)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_heard_of_with_its_parameters(amp, listener: Listener, level: str) -> None:
    model, optimizer = prepared(amp, level)
    for _ in range(2):  # the second one has a scale at which the bias is finite in half
        scale, listener.events = amp.loss_scale(), []
        train_step(amp, model, optimizer, INF)
    overflow = ("overflowed", 0, scale / 2, [[(0, "inf")]])
    assert listener.events[1:] == [overflow, ("stepped", True)]


def test_the_number_of_the_scaler_is_told(amp, listener: Listener) -> None:
    model, optimizer = prepared(amp, num_losses=2)
    backward(amp, model, optimizer, loss_id=1)
    assert listener.events[0][3] == 1


def test_a_detached_observer_hears_nothing(amp) -> None:
    listener = Listener()
    detach = session.observers.attach(listener)
    detach()
    detach()
    model, optimizer = prepared(amp)
    train_step(amp, model, optimizer)
    assert listener.events == []
    assert not session.observers


def test_what_an_observer_raises_ends_the_script_at_its_step(amp) -> None:
    class Ends(StepObserver):
        def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
            raise SystemExit("seen enough")

    detach = session.observers.attach(Ends())
    model, optimizer = prepared(amp, "O2", 8.0)
    before = model.weight.detach().clone()
    with pytest.raises(SystemExit, match="seen enough"):
        train_step(amp, model, optimizer)
    detach()
    assert not torch.equal(model.weight, before)
    train_step(amp, model, optimizer)  # goes on


def test_observers_outlive_the_session(amp, listener: Listener) -> None:
    prepared(amp)
    amp.deactivate()
    model, optimizer = prepared(amp, "O2", 8.0)
    train_step(amp, model, optimizer)
    assert isinstance(model, Weight)
    assert [event[0] for event in listener.events] == ["scaled", "stepped"]
