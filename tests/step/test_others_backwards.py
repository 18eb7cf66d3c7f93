"""What backwards that are not for an optimizer write to its gradients, and what is known of it."""

import pytest
import torch
from one_optimizer import backward_of, make_pass
from torch.optim import Optimizer

from amp_patch.step.optimizer_backward import OptimizerBackward


def write(backward: OptimizerBackward) -> None:
    """Write what a backward of another loss would."""
    param = backward.pairs().model[0]
    param.grad = torch.full_like(param, 8.0)


def test_what_the_scaled_loss_of_another_wrote_is_refused(backward: OptimizerBackward) -> None:
    watch = backward.others.watch_foreign(8.0)
    write(backward)
    backward.others.note_foreign(watch, [], 8.0)
    with pytest.raises(RuntimeError, match="got 1 that the backward"):
        backward.refuse_scaled("optimizer.step()")


def test_what_a_backward_without_a_scale_wrote_is_true(backward: OptimizerBackward) -> None:
    backward.others.expect_foreign()
    write(backward)
    backward.refuse_scaled("optimizer.step()")


def test_what_the_other_optimizer_holds_too_is_unscaled_by_that(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    watch = backward.others.watch_foreign(8.0)
    write(backward)
    backward.others.note_foreign(watch, [backward_of(optimizer)], 8.0)
    backward.refuse_scaled("optimizer.step()")


def test_new_gradients_of_no_own_pass_are_told_from_others(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    watch = backward.others.watch_own()
    assert not backward.others.wrote_own(watch)
    write(backward)
    assert backward.others.wrote_own(watch)
    watch = backward.others.watch_own()
    make_pass(backward, optimizer, 3.0, 4.0)
    assert not backward.others.wrote_own(watch)  # the block is open
    backward.leave_scaled(4.0)
    assert not backward.others.wrote_own(watch)  # it has ended, and wrote them
