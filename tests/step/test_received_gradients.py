"""Gradients that masters have received are told from what a user makes of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amp_patch.step.received_gradients import ReceivedGradients


def params_with_gradients() -> list[Tensor]:
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def noted(params: list[Tensor], weakly: bool = False) -> ReceivedGradients:
    """Note them as two passes have given them."""
    received = ReceivedGradients()
    for part in (params[:1], params[1:]):
        grads = [param.grad for param in part if param.grad is not None]
        references = list(map(weakref.ref, grads)) if weakly else grads
        received.note(part, [grad._version for grad in grads], references)
    return received


def written(param: Tensor) -> None:
    param.grad.mul_(2)


def replaced(param: Tensor) -> None:
    param.grad = torch.zeros_like(param)  # of the version that the other has


def cleared(param: Tensor) -> None:
    param.grad = None


@pytest.mark.parametrize("weakly", [False, True])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("touch", [written, replaced, cleared])
def test_each_touch_of_each_gradient_is_seen(
    touch: Callable[[Tensor], None], which: int, weakly: bool
) -> None:
    params = params_with_gradients()
    received = noted(params, weakly)
    assert received
    assert received.are_untouched()
    touch(params[which])
    assert not received.are_untouched()


def test_those_that_are_kept_are_as_they_were_noted() -> None:
    params = params_with_gradients()
    received = noted(params)
    replaced(params[1])
    assert received.params() == params
    by_param = received.by_param()
    assert set(by_param) == set(map(id, params))
    received.keep([params[0], params[2]], by_param)
    assert received.are_untouched()
    written(params[2])
    assert not received.are_untouched()
    received.clear()
    assert not received
    assert received.are_untouched()
