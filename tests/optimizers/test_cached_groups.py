"""What is looked up once for many steps is looked up again when it changed, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from amp_patch.optimizers.cached_groups import CachedGroups
from amp_patch.optimizers.groups import GroupUpdate


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
    return optimizer, CachedGroups(GroupUpdate)


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
    groups = CachedGroups(GroupUpdate)
    inputs(optimizer, groups)
    assert groups.groups[0].are_plain(grads) is plain
