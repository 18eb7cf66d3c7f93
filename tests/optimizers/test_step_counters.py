"""Counters of steps advance together, and follow what is loaded or moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amp_patch.optimizers.step_counters import StepCounters


def test_they_advance_in_one_memory_which_the_states_hold() -> None:
    states = [{"step": torch.tensor(float(n))} for n in (1, 5)]
    counters = StepCounters()
    for _ in range(2):
        steps = counters.advance(states)
    assert [state["step"] for state in states] == [3.0, 7.0]
    assert counters.values() == [3.0, 7.0]
    assert all(state["step"] is step for state, step in zip(states, steps, strict=True))
    assert steps[0].untyped_storage().data_ptr() == steps[1].untyped_storage().data_ptr()


@pytest.mark.parametrize("moved", [Tensor.double, Tensor.clone])
@pytest.mark.parametrize("count", [1, 2])
def test_counters_that_were_moved_by_their_data_count_on(
    moved: Callable[[Tensor], Tensor], count: int
) -> None:
    states = [{"step": torch.tensor(float(n))} for n in (1, 5)]
    counters = StepCounters()
    counters.advance(states)
    for state in states[:count]:  # as a widely copied function moves an optimizer's state
        state["step"].data = moved(state["step"].data)
    steps = counters.advance(states)
    assert [state["step"].item() for state in states] == [3.0, 7.0]
    assert all(state["step"] is step for state, step in zip(states, steps, strict=True))
    for state in states:
        state["step"].data = moved(state["step"].data)
    on_device = counters.gather(states, torch.device("cpu"), torch.float32)
    assert [(one.item(), one.dtype) for one in on_device] == [
        (3.0, torch.float32),
        (7.0, torch.float32),
    ]


def test_a_loaded_counter_is_taken_in() -> None:
    states = [{"step": torch.tensor(1.0)}, {"step": torch.tensor(1.0)}]
    counters = StepCounters()
    counters.advance(states)
    states[1]["step"] = torch.tensor(40.0)
    counters.advance(states)
    assert counters.values() == [3.0, 41.0]


def test_a_step_that_was_not_made_is_taken_back() -> None:
    counters = StepCounters()
    states = [{"step": torch.tensor(1.0)}]
    counters.advance(states)
    counters.take_back()
    assert states[0]["step"] == 1.0


def test_gathered_they_are_of_the_dtype_asked_for() -> None:
    states = [{"step": torch.tensor(2.0)}]
    counters = StepCounters()
    (step,) = counters.gather(states, torch.device("cpu"), torch.int64)
    assert (step.dtype, step.item()) == (torch.int64, 2)
    assert states[0]["step"] is step
