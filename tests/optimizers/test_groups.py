"""What is looked up once for many steps is looked up again when it changed, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from amp_patch.optimizers.groups import CachedGroups, GroupUpdate, StepCounters, values_of


class Numbers(GroupUpdate):
    """An update with an option that must be numbers."""

    numbers = ("betas",)


class Counted(dict[Any, Any]):
    """An optimizer's state that counts how often a parameter's is asked for."""

    lookups = 0

    def __getitem__(self, key: Any) -> Any:
        self.lookups += 1
        return super().__getitem__(key)


@pytest.fixture
def stepped() -> tuple[Optimizer, CachedGroups]:
    """An optimizer of three parameters, one step on, and its groups."""
    optimizer = Adam([nn.Parameter(torch.ones(n)) for n in (1, 2, 3)])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state = Counted(optimizer.state)
    return optimizer, CachedGroups(Numbers)


def inputs(optimizer: Optimizer, groups: CachedGroups) -> Any:
    groups.look_up(optimizer)
    group = optimizer.param_groups[0]
    return groups.groups[0].inputs(optimizer, group, [param.grad for param in group["params"]])


def test_states_are_looked_up_once(stepped: tuple[Optimizer, CachedGroups]) -> None:
    optimizer, groups = stepped
    for _ in range(3):
        found = inputs(optimizer, groups)
    params = optimizer.param_groups[0]["params"]
    assert optimizer.state.lookups == 3
    assert found.params is params
    assert [state["step"] for state in found.states] == [1, 1, 1]


def to_another_state(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[1]] = {"step": torch.tensor(5.0)}


def to_another_parameter(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    new = nn.Parameter(torch.ones(2))
    new.grad = torch.ones(2)
    optimizer.state[new] = {"step": torch.tensor(5.0)}
    params[1] = new


def to_no_gradient(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    params[1].grad = None


@pytest.mark.parametrize(
    ("change", "steps"),
    [(to_another_state, [1, 5, 1]), (to_another_parameter, [1, 5, 1]), (to_no_gradient, [1, 1])],
)
def test_what_changed_is_seen(
    stepped: tuple[Optimizer, CachedGroups], change: Any, steps: list[int]
) -> None:
    optimizer, groups = stepped
    inputs(optimizer, groups)
    change(optimizer, optimizer.param_groups[0]["params"])
    assert [state["step"] for state in inputs(optimizer, groups).states] == steps


def test_groups_come_and_go_with_the_optimizers(stepped: tuple[Optimizer, CachedGroups]) -> None:
    optimizer, groups = stepped
    inputs(optimizer, groups)
    first = groups.groups[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    groups.look_up(optimizer)
    assert len(groups.groups) == 2
    assert groups.groups[0] is first
    del optimizer.param_groups[1]
    groups.look_up(optimizer)
    assert groups.groups == [first]


def test_without_gradients_nothing_is_stepped(stepped: tuple[Optimizer, CachedGroups]) -> None:
    optimizer, groups = stepped
    optimizer.zero_grad()
    assert inputs(optimizer, groups) is None


@pytest.mark.parametrize(
    ("dtypes", "grads", "plain"),
    [
        ([torch.float32, torch.float32], [torch.ones(1)], True),
        ([torch.float32, torch.float64], [torch.ones(1)], False),
        ([torch.float16, torch.float16], [torch.ones(1)], False),
        ([torch.float32, torch.float32], [torch.ones(1), torch.ones(1).to_sparse()], False),
    ],
)
def test_fused_steps_take_float32_and_dense_gradients(
    dtypes: list[torch.dtype], grads: list[Tensor], plain: bool
) -> None:
    optimizer = Adam([nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in dtypes])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    groups = CachedGroups(Numbers)
    inputs(optimizer, groups)
    assert groups.groups[0].are_plain(grads) is plain


class TestStepCounters:
    def test_they_advance_in_one_memory_which_the_states_hold(self) -> None:
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
        self, moved: Callable[[Tensor], Tensor], count: int
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

    def test_a_loaded_counter_is_taken_in(self) -> None:
        states = [{"step": torch.tensor(1.0)}, {"step": torch.tensor(1.0)}]
        counters = StepCounters()
        counters.advance(states)
        states[1]["step"] = torch.tensor(40.0)
        counters.advance(states)
        assert counters.values() == [3.0, 41.0]

    def test_a_step_that_was_not_made_is_taken_back(self) -> None:
        counters = StepCounters()
        states = [{"step": torch.tensor(1.0)}]
        counters.advance(states)
        counters.take_back()
        assert states[0]["step"] == 1.0

    def test_gathered_they_are_of_the_dtype_asked_for(self) -> None:
        states = [{"step": torch.tensor(2.0)}]
        counters = StepCounters()
        (step,) = counters.gather(states, torch.device("cpu"), torch.int64)
        assert (step.dtype, step.item()) == (torch.int64, 2)
        assert states[0]["step"] is step


@pytest.mark.parametrize(
    ("options", "suits"),
    [
        ({"betas": (0.9, 0.99)}, True),
        ({"betas": 0.9}, True),
        ({}, True),
        ({"betas": (0.9, torch.tensor(0.99))}, False),
        ({"betas": 0.9, "differentiable": True}, False),
    ],
)
def test_kernels_take_numbers(options: dict[str, Any], suits: bool) -> None:
    assert Numbers.suits_kernels(options) is suits


def test_the_values_of_an_option_are_those_of_a_list_or_itself() -> None:
    assert [*map(values_of, ([1, 2], (3,), 4))] == [[1, 2], (3,), [4]]
