"""Writes by ``grad.data``, which move no version, are found by the numbers themselves."""

import pytest
import torch
from torch import Tensor, nn

from amp_patch.common.early_looks import WATCHED
from amp_patch.gradients.unseen_gradient_writes import UnseenGradientWrites


def params(*grads: Tensor | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2, 3, dtype=torch.float16)) for _ in grads]
    for param, grad in zip(made, grads, strict=True):
        param.grad = grad
    return made


def half(value: float) -> Tensor:
    return torch.full((2, 3), value, dtype=torch.float16)


@pytest.mark.parametrize("value", [0.0, 2.0, torch.inf])
def test_a_write_is_found_and_no_other_gradient_taken_for_written(value: float) -> None:
    first, second = params(half(1.0), half(1.0))
    writes = UnseenGradientWrites()
    writes.note([first, second])
    assert writes.written([first, second]) == set()
    second.grad.data.fill_(value)
    assert writes.written([first, second]) == {id(second)}
    assert writes.written([first]) == set()


def test_what_is_noted_again_is_as_it_is_then() -> None:
    (param,) = params(half(1.0))
    writes = UnseenGradientWrites()
    writes.note([param])
    param.grad.data.zero_()
    writes.note([param])
    assert writes.written([param]) == set()


def test_only_dense_gradients_in_half_are_watched() -> None:
    sparse, none = params(half(1.0).to_sparse(1), None)
    single = nn.Parameter(torch.zeros(2))
    single.grad = torch.ones(2)
    writes = UnseenGradientWrites()
    writes.note([sparse, none, single])
    assert not writes.sums


def test_each_step_uses_up_one_of_the_passes() -> None:
    (param,) = params(half(1.0))
    writes = UnseenGradientWrites()
    writes.note([param])
    writes.forget()
    assert writes.looks.left == WATCHED - 1
    param.grad.data.zero_()
    assert writes.written([param]) == set()
