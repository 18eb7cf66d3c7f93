"""Parameters that leave an optimizer have true gradients, or their scale is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs


def pair(dtype: torch.dtype) -> tuple[ParamPairs, Tensor, Tensor]:
    """Return a parameter with a master of its own in half, in fp32 with itself."""
    param = nn.Parameter(torch.zeros(2, dtype=dtype))
    master = param if dtype is torch.float32 else nn.Parameter(torch.zeros(2))
    return ParamPairs([param], [master]), param, master


def backward(param: Tensor, value: float) -> None:
    """Add to the gradient as a backward does."""
    written = torch.full_like(param, value)
    param.grad = written if param.grad is None else param.grad + written


def received(gradients: Gradients, pairs: ParamPairs, value: float) -> None:
    """Make a block at a scale of 8, whose gradients are these."""
    gradients.set_aside(pairs, 8.0)
    backward(pairs.model[0], value * 8.0)
    gradients.passes.receive_alone(pairs, 8.0)


HALF_OR_NOT = pytest.mark.parametrize("dtype", [torch.float16, torch.float32])


@HALF_OR_NOT
def test_true_gradients_are_at_the_parameters_alone(dtype: torch.dtype) -> None:
    gradients = Gradients()
    pairs, param, master = pair(dtype)
    received(gradients, pairs, 3.0)
    assert gradients.parted.let_go(pairs, [], None) == []
    assert param.grad.tolist() == [3.0, 3.0]
    assert master is param or master.grad is None


@HALF_OR_NOT
def test_the_scale_is_told_of_what_waits_for_the_next_block(dtype: torch.dtype) -> None:
    gradients = Gradients()
    pairs, param, _ = pair(dtype)
    gradients.set_aside(pairs, 8.0)
    backward(param, 24.0)
    gradients.delay(pairs, 8.0)
    assert gradients.parted.let_go(pairs, [], None) == [(param, 8.0)]
    assert param.grad.tolist() == [24.0, 24.0]
    assert gradients.scaled.scale is None


@HALF_OR_NOT
def test_what_others_have_waits_on(dtype: torch.dtype) -> None:
    gradients = Gradients()
    pairs, param, _ = pair(dtype)
    rest, other, _ = pair(dtype)
    both = ParamPairs(pairs.model + rest.model, pairs.master + rest.master)
    gradients.set_aside(both, 8.0)
    backward(param, 24.0)
    backward(other, 40.0)
    gradients.delay(both, 8.0)
    gradients.parted.let_go(pairs, rest.model, None)
    assert gradients.scaled.scale == 8.0
    assert other.grad.tolist() == [40.0, 40.0]


@HALF_OR_NOT
def test_in_a_block_a_true_gradient_of_before_is_added_to_what_it_has_written(
    dtype: torch.dtype,
) -> None:
    gradients = Gradients()
    pairs, param, master = pair(dtype)
    received(gradients, pairs, 3.0)
    gradients.set_aside(pairs, 8.0)
    backward(param, 16.0)
    assert gradients.parted.let_go(pairs, [], 8.0) == []
    assert param.grad.tolist() == [5.0, 5.0]
    assert master is param or master.grad is None
    assert not gradients.are_earlier


@HALF_OR_NOT
def test_in_a_block_that_has_not_reached_them_they_have_that_of_before(dtype: torch.dtype) -> None:
    gradients = Gradients()
    pairs, param, _ = pair(dtype)
    received(gradients, pairs, 3.0)
    gradients.set_aside(pairs, 8.0)
    assert gradients.parted.let_go(pairs, [], 8.0) == []
    assert param.grad.tolist() == [3.0, 3.0]


def test_a_gradient_that_was_cleared_at_the_half_parameter_is_not_back() -> None:
    gradients = Gradients()
    pairs, param, master = pair(torch.float16)
    received(gradients, pairs, 3.0)
    param.grad = None
    assert gradients.parted.let_go(pairs, [], None) == []
    assert param.grad is None
    assert master.grad is None
