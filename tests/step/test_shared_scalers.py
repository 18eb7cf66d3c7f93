"""The loss scalers of a process: shared, extended, and never those of another's loss."""

from __future__ import annotations

import gc
from types import ModuleType

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from small_models import normed_pair as make
from support import trains
from torch import nn
from torch.optim import SGD, Optimizer

from amp_patch.session import session


def scales() -> list[float]:
    return [scaler.scale for scaler in session.scalers]


def scaler_ids(optimizer: Optimizer, num_losses: int) -> list[int]:
    step = session.optimizers.steps[optimizer]
    return [session.optimizers.scalers.index_of(step, loss_id) for loss_id in range(num_losses)]


def overflow(amp: ModuleType, run: tuple[nn.Module, Optimizer], loss_id: int = 0) -> None:
    run[1].zero_grad()
    loss = run[0](torch.randn(4, 4)).sum() * float("inf")
    with amp.scale_loss(loss, run[1], loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
    run[1].step()


def test_scalers_in_use_are_shared_extended_and_never_reset(amp: ModuleType) -> None:
    first = amp.initialize(*make(), opt_level="O2", verbosity=0)
    scalers = session.scalers
    overflow(amp, first)
    assert scales() == [2.0**15]
    second = amp.initialize(*make(), opt_level="O1", num_losses=3, verbosity=0)
    assert session.scalers is scalers
    assert scales() == [2.0**15, 2.0**16, 2.0**16]
    overflow(amp, second)
    overflow(amp, second, loss_id=2)
    assert scales() == [2.0**14, 2.0**16, 2.0**15]
    assert [amp.loss_scale(index) for index in range(3)] == scales()


def test_another_rule_gets_scalers_of_its_own_found_by_its_own_loss_ids(amp: ModuleType) -> None:
    first = amp.initialize(*make(), opt_level="O2", verbosity=0)
    second = amp.initialize(*make(), opt_level="O2", loss_scale=8.0, num_losses=2, verbosity=0)
    third = amp.initialize(*make(), opt_level="O2", num_losses=2, verbosity=0)
    assert scales() == [2.0**16, 8.0, 8.0, 2.0**16]
    assert len(set(map(id, session.scalers))) == 4
    maps = [session.optimizers.steps[optimizer].scalers for _, optimizer in (first, second, third)]
    assert maps == [{0: 0}, {0: 1, 1: 2}, {0: 0, 1: 3}]
    overflow(amp, third, loss_id=1)
    overflow(amp, second, loss_id=1)
    assert scales() == [2.0**16, 8.0, 8.0, 2.0**15]
    second[1].zero_grad()
    loss = second[0](torch.randn(4, 4)).sum()
    with amp.scale_loss(loss, second[1]) as scaled_loss:
        assert torch.equal(scaled_loss, loss * 8.0)
        scaled_loss.backward()


def test_scalers_of_dead_optimizers_are_replaced_and_the_list_shrinks(amp: ModuleType) -> None:
    first = amp.initialize(*make(), opt_level="O2", num_losses=3, verbosity=0)
    overflow(amp, first, loss_id=0)
    overflow(amp, first, loss_id=2)
    del first
    gc.collect()
    amp.initialize(*make(), opt_level="O2", num_losses=2, verbosity=0)
    assert scales() == [2.0**16, 2.0**16]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_training_that_diverged_and_lives_on_leaves_the_next_one_no_scale(
    amp: ModuleType, level: str
) -> None:
    first = amp.initialize(*make(), opt_level=level, verbosity=0)
    for _ in range(41):
        overflow(amp, first)
    with pytest.raises(FloatingPointError):
        overflow(amp, first)
    assert amp.loss_scale() == 2.0**-24
    amp.initialize(*make(), opt_level=level, verbosity=0)
    assert scales() == [2.0**16]


def test_a_training_that_diverges_beside_another_of_its_scale_warns(amp: ModuleType) -> None:
    runs = [
        amp.initialize(*make(), opt_level="O1", init_scale=2.0, growth_interval=n, verbosity=0)
        for n in (1000, 1000, 2000)
    ]
    for _ in range(4):
        overflow(amp, runs[2])  # whose scale is its own
    overflow(amp, runs[0])
    with pytest.warns(UserWarning, match="overflows down to a scale of 1 in one of several that"):
        overflow(amp, runs[0])
    overflow(amp, runs[0])  # warnings are errors here: it comes once


Call = tuple[int, float, bool]  # num_losses, loss_scale, whether the optimizer lives on


@hypothesis.given(
    calls=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([2.0, 4.0]), st.booleans()), max_size=6
    )
)
@trains(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_living_optimizer_keeps_its_scalers_and_each_loss_has_its_own(
    amp: ModuleType, calls: list[Call]
) -> None:
    living: list[tuple[Optimizer, float, list[int]]] = []
    for num_losses, scale, lives_on in calls:
        optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        amp.initialize(
            [], optimizer, opt_level="O0", loss_scale=scale, num_losses=num_losses, verbosity=0
        )
        ids = scaler_ids(optimizer, num_losses)
        assert len(set(ids)) == num_losses
        scalers = [id(session.scalers[index]) for index in ids]
        if lives_on:
            living.append((optimizer, scale, scalers))
        for other, other_scale, other_scalers in living:
            found = [session.scalers[index] for index in scaler_ids(other, len(other_scalers))]
            assert list(map(id, found)) == other_scalers
            assert {scaler.scale for scaler in found} == {other_scale}
        del optimizer
    amp.deactivate()
