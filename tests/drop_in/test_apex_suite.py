"""What apex's own tests of apex.amp hold it to, beyond what scripts need."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn


@pytest.fixture
def amp(apex: types.ModuleType) -> Iterator[types.ModuleType]:
    """apex.amp, deactivated at the end."""
    from amp_patch import amp as core

    yield apex.amp
    core.deactivate()


def prepared(amp, level: str = "O1", **options) -> torch.optim.Optimizer:
    """Return an optimizer of a small model, initialized."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


def scale_of(amp, optimizer: torch.optim.Optimizer, loss_id: int = 0) -> float:
    """Return the factor that a loss of an optimizer is multiplied by."""
    with amp.scale_loss(torch.tensor(1.0), optimizer, loss_id=loss_id) as scaled_loss:
        return scaled_loss.item()


def test_each_initialize_starts_the_scales_that_all_optimizers_use_anew(amp) -> None:
    """A model and its restored copy go on in step: both overflow, or neither."""
    static = prepared(amp, "O0", num_losses=2)
    first = prepared(amp, num_losses=2)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    again = prepared(amp, num_losses=2)
    assert (scale_of(amp, first), scale_of(amp, again)) == (2.0**16, 2.0**16)
    amp._amp_state.loss_scalers[1]._loss_scale = 4.0
    assert (scale_of(amp, first, 1), scale_of(amp, again, 1)) == (4.0, 4.0)
    assert scale_of(amp, static) == 1.0


def test_scalers_of_the_last_initialize_are_saved_first(amp) -> None:
    earlier = [prepared(amp, "O0", num_losses=3), prepared(amp, loss_scale=128.0)]
    prepared(amp, num_losses=2)
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    assert scales == [2.0**16, 2.0**16, 1.0, 1.0, 1.0, 128.0]
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == scales[:2]
    assert [scale_of(amp, optimizer) for optimizer in earlier] == [1.0, 128.0]
    assert scale_of(amp, earlier[0], 2) == 1.0


def test_scalers_are_shown_where_their_optimizer_is_gone(amp) -> None:
    prepared(amp, num_losses=3)
    model = nn.Linear(2, 2)
    assert amp.initialize(model, opt_level="O1", verbosity=0) is model
    assert [scaler.dynamic for scaler in amp._amp_state.loss_scalers] == [True]


OPTIMIZERS = ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")


def state_after_training(apex, name: str, default_device: str) -> dict[str, torch.Tensor]:
    """Return a model on the CPU after two steps at O2, the first of them skipped."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, device="cpu")
    batch = torch.randn(5, 3, device="cpu")
    optimizer = getattr(apex.optimizers, name)(model.parameters(), lr=0.1)
    with torch.device(default_device):
        apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for factor in (float("inf"), 1.0):
            with apex.amp.scale_loss(model(batch).pow(2).mean() * factor, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_models_train_whatever_the_default_device_is(amp, apex, name: str) -> None:
    """apex's tests make CUDA the default; a tensor made there by mistake shows on 'meta'."""
    expected = state_after_training(apex, name, "cpu")
    torch.manual_seed(0)
    assert not torch.equal(expected["weight"], nn.Linear(3, 2).weight)
    for key, value in state_after_training(apex, name, "meta").items():
        assert torch.equal(value, expected[key]), key
