"""Earlier weights that come back after a training that diverged: they train at a new scale."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from training import batches, loss_of, make, prepared, trained_rightly, weights

from amp_patch import amp as core
from amp_patch.step import loss_scaling

INITIAL_SCALE = 65536.0


def scale_of(amp: ModuleType) -> Any:
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def train(amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    for inputs in batches():
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, inputs) * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def diverge(amp: ModuleType, model: nn.Module, optimizer: Any) -> None:
    for _ in range(5):
        train(amp, model, optimizer, torch.inf)
    assert scale_of(amp) < 1.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_that_come_back_train_as_from_the_start(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(amp, model, optimizer)
    diverge(amp, model, optimizer)
    model.load_state_dict(saved)
    assert scale_of(amp) == INITIAL_SCALE
    train(amp, model, optimizer)
    torch.testing.assert_close(weights(model), trained_rightly(level))


def test_a_scale_that_trains_stays(amp: ModuleType) -> None:
    """Below 1, too: gradients that large need it."""
    model, optimizer = prepared(amp, "O1")
    train(amp, model, optimizer)
    diverge(amp, model, optimizer)
    train(amp, model, optimizer)
    low = scale_of(amp)
    model.load_state_dict(model.state_dict())
    assert scale_of(amp) == low


@pytest.mark.parametrize("runs_ahead", [set(), {"cpu"}], ids=["host", "device ahead"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_that_are_written_back_at_a_lost_scale_are_told_of_once(
    amp: ModuleType, level: str, runs_ahead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a device moves the scale, of an optimizer that can skip by its flag."""
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", runs_ahead)
    model, _ = make()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    saved, state = weights(model), amp.state_dict()
    for _ in range(2):
        diverge(amp, model, optimizer)
    with torch.no_grad():
        for param, value in zip(model.parameters(), saved, strict=True):
            param.copy_(value)
    with pytest.warns(UserWarning, match="must be one at which float16 gradients") as told:
        train(amp, model, optimizer)
    assert len(told) == 1
    assert told[0].filename == __file__
    amp.load_state_dict(state)
    train(amp, model, optimizer)
    assert scale_of(amp) == INITIAL_SCALE


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_still_falls_is_left_to_it(amp: ModuleType, level: str) -> None:
    """Gradients that need one below 1 would never train where weights are loaded in each round.

    Nor is anybody told that the scale is low.
    """
    model, optimizer = amp.initialize(*make(torch.optim.Adam), opt_level=level, verbosity=0)
    for _ in range(10):
        model.load_state_dict(model.state_dict())
        train(amp, model, optimizer, 1e9)
    assert core.state_dict()["loss_scaler0"]["unskipped"] > 0
    assert 0.0 < scale_of(amp) < 2.0**-10


@pytest.mark.usefixtures("amp")
def test_a_scale_that_hysteresis_holds_stays() -> None:
    model, optimizer = prepared(core, "O1", hysteresis=3)
    train(core, model, optimizer)
    core.load_state_dict({"loss_scaler0": {"loss_scale": 0.125, "unskipped": 0}})
    with core.scale_loss(loss_of(model, next(batches())) * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert core.step_was_skipped(optimizer)
    model.load_state_dict(model.state_dict())
    assert scale_of(core) == 0.125


def test_a_scale_that_was_loaded_stays(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    train(amp, model, optimizer)
    diverge(amp, model, optimizer)
    low = scale_of(amp)
    amp.load_state_dict(amp.state_dict())
    model.load_state_dict(model.state_dict())
    assert scale_of(amp) == low


def test_a_load_of_another_model_is_none_of_this_one(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, "O1")
    train(amp, model, optimizer)
    diverge(amp, model, optimizer)
    other, _ = make()
    other.load_state_dict(other.state_dict())
    assert scale_of(amp) < 1.0
