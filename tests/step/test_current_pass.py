"""The pass that an optimizer is in: what is refused inside, its thread, its early end."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD

from amp_patch.gradients.gradients import Gradients
from amp_patch.step.current_pass import CurrentPass
from amp_patch.step.held_params import HeldParams
from amp_patch.step.skip import Skip


class Block:
    """What is asked of a pass.

    Attributes:
        calls: what was called, in this order.
    """

    def __init__(self, current: CurrentPass, is_left: bool = False) -> None:
        self._current, self.is_left = current, is_left
        self.calls: list[str] = []

    def unscale_(self) -> None:
        self.calls.append("unscale_")

    def abandon(self) -> None:
        self.calls.append("abandon")
        self._current.close()


@pytest.fixture
def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.zeros(2))], lr=1.0)


@pytest.fixture
def held(optimizer: SGD) -> HeldParams:
    return HeldParams(optimizer, masters=None)


@pytest.fixture
def current(held: HeldParams) -> CurrentPass:
    return CurrentPass(held, Gradients(), Skip(print))


def begin(current: CurrentPass, held: HeldParams, block: Block, is_scaled: bool = True) -> None:
    current.open(block, held.pairs(), 8.0 if is_scaled else 1.0, is_scaled)


def test_inside_a_pass_another_one_is_refused(current: CurrentPass, held: HeldParams) -> None:
    current.refuse_nested()
    begin(current, held, Block(current))
    with pytest.raises(RuntimeError, match="got one inside another"):
        current.refuse_nested()
    current.close()
    current.refuse_nested()


def test_a_pass_that_nobody_can_end_is_abandoned(current: CurrentPass, held: HeldParams) -> None:
    block = Block(current, is_left=True)
    begin(current, held, block)
    current.refuse_nested()
    assert block.calls == ["abandon"]
    assert not current.is_open


def test_another_thread_is_not_here(current: CurrentPass, held: HeldParams) -> None:
    found = [current.is_here]  # nobody's yet
    begin(current, held, Block(current))
    found.append(current.is_here)
    thread = threading.Thread(target=lambda: found.append(current.is_here))
    thread.start()
    thread.join()
    assert found == [True, True, False]


@pytest.mark.parametrize("has_gradients", [True, False])
def test_it_ends_early_where_its_backward_has_written(
    current: CurrentPass, held: HeldParams, has_gradients: bool
) -> None:
    block = Block(current)
    begin(current, held, block)
    if has_gradients:
        (param,) = held.pairs().model
        param.grad = torch.ones(2)
    current.end_early()
    assert block.calls == (["unscale_"] if has_gradients else [])


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_hook_may_step_in_the_backward_at_a_scale_of_1_alone(
    current: CurrentPass, held: HeldParams, is_scaled: bool
) -> None:
    block = Block(current)
    begin(current, held, block, is_scaled)
    loss = torch.ones(1, requires_grad=True).sum()
    loss.register_hook(lambda _: current.end_early(steps=True))
    loss.backward()
    assert current.is_open is is_scaled
    assert block.calls == []
