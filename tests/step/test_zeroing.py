"""Where a script clears its gradients is told, when plain PyTorch would train otherwise."""

import warnings

import pytest
import torch
from torch import nn

from amp_patch.common.early_looks import WATCHED
from amp_patch.common.warn_once import warn_once
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.step.skip import Skip
from amp_patch.step.zeroing import Zeroing


@pytest.fixture(autouse=True)
def untold() -> None:
    warn_once.reset()


class Script:
    """One half parameter with a master, and the calls that a script's lines lead to."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.pairs = ParamPairs([self.param], [nn.Parameter(torch.ones(2))])
        self.gradients = Gradients()
        self.skip = Skip(announce=lambda _: None)
        self.zeroing = Zeroing(self.gradients, self.skip, drops_used=True)

    def block_of_several(self) -> None:
        self.block(is_alone=False)

    def block_of_another(self) -> None:
        self.zeroing.note_other()

    def block(self, reaches: bool = True, is_alone: bool = True) -> None:
        self.zeroing.begin(lambda: self.pairs, is_alone)
        self.gradients.set_aside(self.pairs, 1.0)
        if reaches:
            self.param.grad = torch.ones_like(self.param)
        self.zeroing.look_at_written(self.pairs)
        self.gradients.passes.receive_alone(self.pairs, 1.0)

    def abandoned_block(self) -> None:
        self.zeroing.begin(lambda: self.pairs)
        self.gradients.set_aside(self.pairs, 1.0)
        self.zeroing.abandon()
        self.gradients.put_back(self.pairs)

    def forget_cleared(self) -> None:
        self.skip.forget_cleared()

    def step(self) -> None:
        self.zeroing.tell_of_no_gradients(lambda: self.pairs)
        self.pairs.master[0].grad = None
        self.zeroing.end_step()
        self.gradients.forget()

    def overflow(self) -> None:
        self.skip.ask("Gradient overflow")

    def clear_by_hand(self) -> None:
        self.gradients.drop(self.pairs)

    def zero_grad(self, is_lost: bool = True) -> None:
        self.zeroing.note_cleared(is_lost)
        self.gradients.drop(self.pairs)


def told(*lines: str) -> list[str]:
    """Return what the warnings of these lines got."""
    script = Script()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for line in lines:
            getattr(script, line)()
    return [str(one.message).partition("; got ")[2].partition(" ")[2] for one in caught]


@pytest.mark.parametrize(
    "lines",
    [
        ("block", "step", "zero_grad", "block", "step"),
        ("zero_grad", "block", "step", "zero_grad", "block", "step"),
        ("block", "block", "step"),
        ("block", "zero_grad", "block", "step"),
    ],
)
def test_a_loop_that_clears_between_step_and_block_is_not_told(lines: tuple[str, ...]) -> None:
    assert told(*lines) == []


def test_a_step_behind_cleared_gradients_is_told_once() -> None:
    (message,) = told("block", "zero_grad", "step", "block", "zero_grad", "step")
    assert message.startswith("optimizer.step() after optimizer.zero_grad()")


def test_a_step_behind_gradients_that_are_cleared_by_hand_is_told_once() -> None:
    (message,) = told("block", "clear_by_hand", "step", "block", "clear_by_hand", "step")
    assert message.startswith("optimizer.step() after `p.grad = None`")


@pytest.mark.parametrize(
    "lines",
    [
        ("block_of_several", "clear_by_hand", "step"),  # as DINO freezes its last layer
        ("block", "clear_by_hand", "block_of_another", "step"),
        ("abandoned_block", "block_of_another", "step"),
    ],
)
def test_one_of_several_optimizers_may_step_without_gradients(lines: tuple[str, ...]) -> None:
    assert told(*lines) == []


@pytest.mark.parametrize("clear", ["zero_grad", "clear_by_hand"])
@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_script_may_clear_what_overflowed(clear: str, is_forgotten: bool) -> None:
    """As one does that looks for inf and NaN in its gradients before each step."""
    forget = ["forget_cleared"] * is_forgotten
    assert told("block", "overflow", clear, *forget, "step", "block", "step") == []


def test_gradients_that_are_never_cleared_are_told_once() -> None:
    (message,) = told("block", "step", "block", "step", "block", "step")
    assert message.startswith("scale_loss() block with those of the last step")


def test_used_gradients_that_another_loss_reaches_are_told_of_where_they_are_stepped() -> None:
    """As a generator's loss reaches the discriminator, of which a script clears it first."""
    gan = ("block", "step", "block_of_several", "zero_grad", "block", "step")
    assert told(*gan, *gan[2:]) == []
    (message,) = told("block", "step", "block_of_several", "step")
    assert message.startswith("optimizer.step() with those of the last step")


def test_used_gradients_that_a_block_adds_to_and_the_script_clears_are_not_told() -> None:
    """As an evaluation by attacks leaves them, of which a script wants the input's."""
    attacked = ("zero_grad", "block", "step", "block", "block")
    assert told(*attacked, *attacked, "zero_grad", "block", "step") == []
    (message,) = told(*attacked, "step")
    assert message.startswith("scale_loss() block with those of the last step")


def test_a_step_without_a_block_since_the_last_is_told() -> None:
    (message,) = told("block", "step", "step")
    assert message.startswith("optimizer.step() with those of the last step")


def test_a_step_behind_an_abandoned_block_alone_is_told_of_it() -> None:
    (message,) = told("block", "step", "zero_grad", "abandoned_block", "step")
    assert message.startswith("optimizer.step() after one, which has none")
    (message,) = told("block", "step", "abandoned_block", "step", "zero_grad", "step")
    assert message.startswith("optimizer.step() with those of the last step")


def test_a_clear_in_an_open_block_loses_nothing() -> None:
    script = Script()
    script.zeroing.begin(lambda: script.pairs)
    script.zero_grad(is_lost=False)
    assert not script.zeroing.was_cleared


def test_used_gradients_that_are_cleared_in_the_block_are_not_told() -> None:
    script = Script()
    script.block()
    script.step()
    script.zeroing.begin(lambda: script.pairs)
    script.zero_grad(is_lost=False)
    script.param.grad = torch.ones_like(script.param)
    script.zeroing.look_at_written(script.pairs)  # a warning would be an error


def test_it_looks_at_the_first_passes_alone() -> None:
    script = Script()
    for _ in range(WATCHED):
        script.block(reaches=False)
        assert script.zeroing.is_watched
        assert not script.zeroing.has_written
    script.block()
    assert not script.zeroing.is_watched
    assert script.zeroing.has_written
