"""Which parameters are stepped at once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from amp_patch.kernels import small_tensors
from amp_patch.optimizers import step_parts
from amp_patch.optimizers.adam import AdamUpdate
from amp_patch.optimizers.step_parts import StepParts
from amp_patch.weights.lazy_gradients import LazyGradients


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    """Two groups, whose parameters with more than 10 elements are large."""
    monkeypatch.setattr(small_tensors, "is_small", lambda one: one.numel() <= 10)
    for name in ("_LEAST", "_MOST"):
        monkeypatch.setattr(step_parts, name, 50)
    lazy = LazyGradients()
    masters = [lazy.parameter(torch.ones(n), True) for n in (3, 20, 4, 20, 20, 90)]
    return Adam([{"params": masters[:3]}, {"params": masters[3:], "fused": True}])


def looked_up(parts: StepParts, optimizer: Optimizer) -> list[tuple[int, list[int], list[int]]]:
    parts.look_up(optimizer)
    return [(one.group, list(map(torch.numel, one.params)), one.places) for one in parts.every]


def test_small_ones_of_a_group_are_one_part_and_large_ones_some(optimizer: Optimizer) -> None:
    parts = StepParts(AdamUpdate)
    assert looked_up(parts, optimizer) == [
        (0, [3, 4], [0, 2]),
        (0, [20], [1]),
        (1, [20, 20], [3, 4]),
        (1, [90], [5]),
    ]
    assert [one.are_large for one in parts.every] == [False, True, True, True]


def test_they_are_looked_up_again_only_where_there_are_other_parameters(
    optimizer: Optimizer,
) -> None:
    parts = StepParts(AdamUpdate)
    parts.look_up(optimizer)
    known = parts.every
    parts.look_up(optimizer)
    assert parts.every is known
    optimizer.param_groups[0]["params"][2] = nn.Parameter(torch.ones(5))
    assert looked_up(parts, optimizer)[0] == (0, [3, 5], [0, 2])
    moved = optimizer.param_groups[1]["params"].pop(0)
    optimizer.param_groups[0]["params"].append(moved)  # of the same list of all
    assert looked_up(parts, optimizer)[1] == (0, [20, 20], [1, 3])


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_interrupt_in_the_look_up_leaves_an_optimizer_that_steps(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    original = StepParts._parts_of

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    for is_loaded in (False, True):
        if is_loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        monkeypatch.setattr(StepParts, "_parts_of", interrupted)
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.setattr(StepParts, "_parts_of", original)
        optimizer.zero_grad()
        before = model.weight.detach().float().clone()
        scaled_backward(amp, model(torch.ones(1, 3)).float().sum(), optimizer)
        optimizer.step()
        assert (model.weight.float() - before).abs().min() > 0.05
