"""One optimizer around its passes: these add up, end early or fail."""

from types import ModuleType

import pytest
import torch
from one_optimizer import backward_of, gradients, make_pass
from support import scaled_backward
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from amp_patch.step.optimizer_backward import OptimizerBackward


def test_without_its_optimizer_it_skips_nothing() -> None:
    assert not backward_of(SGD([nn.Parameter(torch.zeros(1))])).skips_by_flag


@pytest.mark.parametrize("fused", [True, False])
def test_torchs_fused_optimizers_skip_by_a_flag(fused: bool) -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], fused=fused)
    assert backward_of(optimizer).skips_by_flag == fused


def test_passes_add_up(optimizer: Optimizer, backward: OptimizerBackward) -> None:
    for scale in (4.0, 8.0):
        make_pass(backward, optimizer, 3.0, scale)
        check, params = backward.receive_alone(backward.pairs(), scale)
        assert not check.overflow
        assert [id(one) for one in params] == [id(one) for one in backward.pairs().model]
    assert gradients(optimizer) == [[6.0, 6.0], [6.0]]


def test_an_abandoned_pass_leaves_what_was_before(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    make_pass(backward, optimizer, 3.0, 4.0)
    backward.receive(backward.pairs(), 4.0)
    make_pass(backward, optimizer, 5.0, 4.0)
    assert backward.current.is_open
    backward.abandon(backward.pairs())
    assert not backward.current.is_open
    assert gradients(optimizer) == [[3.0, 3.0], [3.0]]


def test_gradients_left_scaled_are_refused_until_they_are_cleared(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    make_pass(backward, optimizer, 3.0, 4.0)
    backward.leave_scaled(4.0)
    assert gradients(optimizer) == [[12.0, 12.0], [12.0]]
    assert not backward.takes_grads_as_they_are
    with pytest.raises(RuntimeError, match="delay_unscale=True"):
        backward.refuse_scaled("optimizer.step()")
    optimizer.zero_grad()
    backward.refuse_scaled("optimizer.step()")


def test_a_pass_after_cleared_gradients_skips_nothing(
    optimizer: Optimizer, backward: OptimizerBackward
) -> None:
    backward.skip.ask("an overflow")
    make_pass(backward, optimizer, 3.0, 4.0)
    backward.receive(backward.pairs(), 4.0)
    assert not backward.skip.is_possible
    backward.skip.ask("an overflow")
    make_pass(backward, optimizer, 3.0, 4.0)
    assert backward.skip.is_possible


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_one_micro_batch_is_not_forgotten(amp: ModuleType, level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, init_scale=8.0)
    for factor in (0.0, torch.inf, 0.0):
        loss = (model(torch.ones(1, 2)).float() * factor).sum()
        scaled_backward(amp, loss, optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
