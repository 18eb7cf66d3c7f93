"""What `amp.deactivate` leaves of the gradients of an optimizer."""

import torch
from one_optimizer import backward_of, gradients, make_pass
from torch import nn
from torch.optim import SGD, Optimizer

from amp_patch.step.optimizer_backward import OptimizerBackward
from amp_patch.step.release import release


def test_release_unscales_what_was_left_scaled(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    make_pass(backward, optimizer, 3.0, 4.0)
    backward.leave_scaled(4.0)
    release(backward, None, set())()
    assert gradients(optimizer) == [[3.0, 3.0], [3.0]]


def test_release_drops_what_overflowed(optimizer: Optimizer, backward: OptimizerBackward) -> None:
    make_pass(backward, optimizer, float("inf"), 4.0)
    backward.leave_scaled(4.0)
    release(backward, None, set())()
    assert gradients(optimizer) == [None, None]


def test_what_two_optimizers_hold_is_unscaled_once() -> None:
    shared = nn.Parameter(torch.zeros(2))
    both = [SGD([shared], lr=1.0), SGD([shared], lr=1.0)]
    backwards = [backward_of(one) for one in both]
    make_pass(backwards[0], both[0], 3.0, 4.0)
    unscaled: set[int] = set()
    for one in backwards:
        one.leave_scaled(4.0)
    for end in [release(one, None, unscaled) for one in backwards]:
        end()
    assert gradients(both[1]) == [[3.0, 3.0]]
