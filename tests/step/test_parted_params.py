"""Parameters leave an optimizer with gradients: for another one, or until they come back.

Each layer's gradient is a number that the test gives, and each is exact at every level.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn
from torch.optim import SGD

from amp_patch.session import session

LEVELS = ("O0", "O1", "O2", "O4", "O5")
SCALED = ("O1", "O2", "O5")


class Two:
    """Two optimizers, the first of which has a group of two layers and one of a third.

    Args:
        options: of `amp.initialize`.
    """

    def __init__(self, amp: ModuleType, level: str, **options: Any) -> None:
        self.amp = amp
        self.layers = nn.ModuleList([nn.Linear(2, 1) for _ in range(3)])
        self.first = SGD([{"params": layer.parameters()} for layer in self.layers[:2]], lr=1.0)
        self.second = SGD(self.layers[2].parameters(), lr=1.0)
        if level in SCALED:
            options = {"loss_scale": 64.0, **options}
        both = [self.first, self.second]
        amp.initialize(self.layers, both, opt_level=level, verbosity=0, **options)
        self.began = self.values()

    def values(self) -> list[float]:
        biases = [self.layers.state_dict()[f"{row}.bias"] for row in range(3)]
        return [bias.item() for bias in biases]

    def block(self, *factors: float, **options: Any) -> None:
        """Make a block of both optimizers, which gives the layers these gradients."""
        self.block_of([self.first, self.second], *factors, **options)

    def block_of(self, optimizers: Any, *factors: float, **options: Any) -> None:
        scaled_backward(self.amp, self.loss(*factors), optimizers, **options)

    def loss(self, *factors: float) -> Any:
        inputs = torch.ones(1, 2, dtype=self.layers[0].weight.dtype)
        rows = zip(factors, self.layers, strict=False)
        return sum(by * layer(inputs).float().sum() for by, layer in rows if by)

    def moved_by(self) -> list[float]:
        rows = zip(self.began, self.values(), strict=True)
        return [round(before - now, 2) for before, now in rows]


def add(two: Two) -> None:
    two.second.add_param_group(two.first.param_groups.pop())


def append(two: Two) -> None:
    two.second.param_groups.append(two.first.param_groups.pop())


FUSED = [(level, False) for level in LEVELS] + [("O2", True), ("O5", True)]


@pytest.mark.parametrize("move", [add, append])
@pytest.mark.parametrize(("level", "fused"), FUSED)
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_a_block_move_with_their_group(
    amp: ModuleType, level: str, fused: bool, move: Callable[[Two], None], delay: bool
) -> None:
    two = Two(amp, level, **({"fused_step": True} if fused else {}))
    two.block(1.0, 1.0, 1.0)
    two.block(1.0, 1.0, 1.0, delay_unscale=delay)
    move(two)
    two.block(1.0, 1.0, 1.0)
    two.first.step()
    two.second.step()
    assert two.moved_by() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_moves_after_a_group_has_left_is_followed(amp: ModuleType, level: str) -> None:
    two = Two(amp, level, loss_scale="dynamic", init_scale=4.0, growth_interval=1)
    two.block(1.0, 1.0, 1.0, delay_unscale=True)
    group = two.first.param_groups.pop()
    for _ in range(3):
        two.block(1.0, 0.0, 1.0)
    two.block(1.0, 1.0, 1.0)
    two.second.add_param_group(group)
    two.second.step()
    assert two.moved_by() == [0.0, 2.0, 5.0]


CLEARS: dict[str, Callable[[Two], object]] = {
    "model": lambda two: two.layers.zero_grad(),
    "optimizer": lambda two: two.second.zero_grad(),
    "in place": lambda two: two.second.zero_grad(set_to_none=False),
    "by hand": lambda two: [setattr(param, "grad", None) for param in two.layers.parameters()],
}


@pytest.mark.filterwarnings("ignore:gradients must last until the step")
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("move", [add, append])
@pytest.mark.parametrize(("level", "fused"), FUSED)
def test_what_is_cleared_after_its_group_has_moved_is_not_stepped(
    amp: ModuleType, level: str, fused: bool, move: Callable[[Two], None], clear: str
) -> None:
    two = Two(amp, level, **({"fused_step": True} if fused else {}))
    two.block(1.0, 1.0, 1.0)
    move(two)
    CLEARS[clear](two)
    two.second.step()
    assert two.moved_by() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(("level", "fused"), FUSED)
def test_what_has_left_is_not_cleared_with_the_rest(
    amp: ModuleType, level: str, fused: bool, set_to_none: bool
) -> None:
    two = Two(amp, level, **({"fused_step": True} if fused else {}))
    two.block(1.0, 1.0, 1.0)
    add(two)
    two.first.step()
    two.first.zero_grad(set_to_none=set_to_none)
    two.second.step()
    assert two.moved_by() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_what_waits_for_the_next_block_is_not_cleared_with_the_rest(
    amp: ModuleType, level: str
) -> None:
    two = Two(amp, level)
    two.block(1.0, 2.0)
    two.block(1.0, 0.0, delay_unscale=True)
    group = two.first.param_groups.pop()
    two.first.zero_grad(set_to_none=False)
    two.second.add_param_group(group)
    two.second.step()
    assert two.moved_by() == [0.0, 2.0, 0.0]


@pytest.mark.filterwarnings("ignore:Gradient overflow")
@pytest.mark.parametrize(("level", "fused"), [("O1", False), ("O2", False), ("O2", True)])
def test_what_has_overflowed_is_gone_where_it_moves(
    amp: ModuleType, level: str, fused: bool
) -> None:
    two = Two(amp, level, **({"fused_step": True} if fused else {}))
    two.block(1.0, float("inf"))
    add(two)
    two.block(0.0, 1.0, 1.0)
    two.second.step()
    assert two.moved_by() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("level", SCALED)
def test_a_block_of_another_optimizer_is_no_hindrance_to_one_whose_group_has_left(
    amp: ModuleType, level: str
) -> None:
    two = Two(amp, level)
    two.block_of(two.second, 0.0, 1.0, 1.0)
    add(two)
    two.block_of(two.first, 1.0)
    two.first.step()
    two.second.step()
    assert two.moved_by() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("level", LEVELS)
def test_two_groups_may_change_places(amp: ModuleType, level: str) -> None:
    two = Two(amp, level)
    two.block(1.0, 2.0, 3.0)
    groups = two.first.param_groups, two.second.param_groups
    groups[0][1], groups[1][0] = groups[1][0], groups[0][1]
    two.block(1.0, 1.0, 1.0)
    two.second.step()
    assert two.moved_by() == [0.0, 3.0, 0.0]
    two.first.step()
    assert two.moved_by() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("level", SCALED)
def test_a_layer_that_two_optimizers_let_go_is_added_to_once(amp: ModuleType, level: str) -> None:
    two = Two(amp, level)
    shared = two.first.param_groups[1]
    two.second.add_param_group({"params": list(two.layers[1].parameters())})
    two.block(1.0, 0.0, 1.0)
    for optimizer in (two.first, two.second):
        optimizer.param_groups.pop()
        optimizer.zero_grad()
    two.loss(0.0, 2.0).backward()
    two.block_of(two.first, 1.0, 4.0)
    two.first.param_groups.append(shared)
    two.first.step()
    assert two.moved_by() == [1.0, 6.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_cleared_gradient_of_a_group_that_moved_is_back_after_no_backward(
    amp: ModuleType, level: str
) -> None:
    two = Two(amp, level, loss_scale=1.0)
    group = two.first.param_groups.pop()
    two.loss(0.0, 2.0).backward()
    two.second.param_groups.append(group)
    two.layers.zero_grad()
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()
    assert two.layers[1].bias.grad is None
    two.second.step()
    assert two.moved_by() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_deactivate_in_a_block_unscales_what_no_optimizer_holds(
    amp: ModuleType, level: str
) -> None:
    two = Two(amp, level)
    two.second.param_groups.clear()
    two.second.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    two.second.zero_grad()
    with amp.scale_loss(two.loss(1.0, 0.0, 4.0), two.first) as scaled_loss:
        scaled_loss.backward()
        amp.deactivate()
    assert two.layers[2].bias.grad.tolist() == [4.0]
    assert two.layers[0].bias.grad.tolist() == [1.0]


@pytest.mark.filterwarnings("ignore:Gradient overflow", "ignore:at a level with a loss scale every")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_has_come_and_gone_is_unscaled_after_a_pending_check_has_raised(
    amp: ModuleType, level: str
) -> None:
    two = Two(amp, level, loss_scale="dynamic", init_scale=64.0, min_loss_scale=64.0)
    step = session.optimizers.steps[two.first]
    moving = two.second.param_groups.pop()
    two.second.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    two.block(1.0, 0.0, 2.0)
    two.block_of(two.first, float("inf"))  # an overflow at the floor: the next one raises
    two.first.zero_grad()
    checked = session.passes.of_loss([step], 0, torch.device("cpu"))
    checked.scale(two.loss(float("inf"))).backward()
    checked.unscale_()  # an integration has not called `update` yet
    two.first.param_groups.append(moving)
    step.backward.pairs()
    two.first.param_groups.pop()
    with pytest.raises(FloatingPointError):
        step.backward.pairs()
    two.second.param_groups.append(moving)
    two.second.step()
    assert two.moved_by() == [0.0, 0.0, 2.0]
