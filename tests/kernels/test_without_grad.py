"""`without_grad` against `torch.no_grad`: what functions see, and what they leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_patch.kernels.without_grad import without_grad


@pytest.mark.parametrize("is_on", [True, False])
def test_a_function_runs_without_autograd_and_the_mode_is_as_before(is_on: bool) -> None:
    seen: list[bool] = []

    @without_grad
    def add(weight: Tensor, *, by: float) -> Tensor:
        """Add in place."""
        seen.append(torch.is_grad_enabled())
        return weight.add_(by)

    weight = torch.zeros(2, requires_grad=True)
    with torch.set_grad_enabled(is_on):
        added = add(weight, by=2.0)  # to a leaf: an error where autograd is on
        assert torch.is_grad_enabled() == is_on
    assert added is weight
    assert weight.tolist() == [2.0, 2.0]
    assert weight.grad_fn is None
    assert seen == [False]
    assert add.__doc__ == "Add in place."


@pytest.mark.parametrize("is_on", [True, False])
def test_the_mode_is_as_before_where_the_function_raises(is_on: bool) -> None:
    @without_grad
    def fail() -> None:
        raise ValueError("no")

    with torch.set_grad_enabled(is_on):
        with pytest.raises(ValueError, match="no"):
            fail()
        assert torch.is_grad_enabled() == is_on


def test_a_function_may_switch_it_on_inside() -> None:
    @without_grad
    def graph_of(weight: Tensor) -> Tensor:
        with torch.enable_grad():
            return weight * 2

    weight = torch.ones(2, requires_grad=True)
    assert graph_of(weight).requires_grad
    assert torch.is_grad_enabled()
