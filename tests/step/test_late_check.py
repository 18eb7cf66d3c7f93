"""What the host can still tell of a check when its outcome comes late; and when it cannot."""

import gc

import torch
from torch import nn

from amp_patch import kernels
from amp_patch.step.late_check import LateCheck
from amp_patch.weights.parameter_lists import Tensors

INF = float("inf")


def checked() -> tuple[Tensors, LateCheck]:
    """Return two parameters, the second with a gradient of inf, and what is kept of its check."""
    params = Tensors([nn.Parameter(torch.zeros(2)) for _ in range(2)])
    for param, value in zip(params, (1.0, INF), strict=True):
        param.grad = torch.full((2,), value)
    grads = [param.grad for param in params]
    return params, LateCheck(kernels.unscaler(grads, grads).run(grads, grads, 1.0), params)


def test_it_tells_while_the_gradients_are_as_they_were() -> None:
    params, check = checked()
    assert check.overflow
    assert check.is_known
    assert check.nonfinite() == [(1, "inf")]
    assert [id(one) for one in check.params()] == [id(one) for one in params]
    assert [id(one) for one in check.gradients()] == [id(one.grad) for one in params]


def test_gradients_that_were_cleared_or_written_to_are_gone() -> None:
    params, check = checked()
    params[0].grad += 1
    assert check.gradients() is None
    params, check = checked()
    params[0].grad = None
    assert check.gradients() is None


def test_where_one_of_several_gradients_was_cleared_none_is_told_of() -> None:
    params, check = checked()
    params[1].grad = None
    assert check.gradients() is None


def test_it_keeps_no_parameter_alive() -> None:
    params, check = checked()
    del params
    gc.collect()
    assert check.params() == []
    assert not check.is_known
