"""What a scaled backward adds to true gradients is divided; nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_patch.gradients.true_gradients import TrueGradients


@pytest.fixture
def param() -> nn.Parameter:
    one = nn.Parameter(torch.ones(2))
    one.grad = torch.full((2,), 3.0)
    return one


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)])
def test_what_is_added_is_divided_until_the_end(
    param: nn.Parameter, scale: float | torch.Tensor
) -> None:
    true = TrueGradients(scale)
    true.keep([param])
    assert true.is_as_it_was(param)
    (param * param).sum().mul(8.0).backward()
    assert param.grad.tolist() == [5.0, 5.0]
    assert true.has(param)
    assert not true.is_as_it_was(param)
    true.end()
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [13.0, 13.0]


def test_not_while_another_block_is_open_inside(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    true.is_on = False
    param.sum().backward()
    assert param.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_what_is_cleared_is_true_no_more(param: nn.Parameter, set_to_none: bool) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    param.grad = None if set_to_none else torch.zeros(2)
    param.sum().mul(8.0).backward()
    assert param.grad.tolist() == [8.0, 8.0]
    assert not true.has(param)


def test_what_overflows_leaves_the_true_gradient(param: nn.Parameter) -> None:
    true = TrueGradients(8.0)
    true.keep([param])
    (param * torch.tensor([1.0, torch.inf])).sum().backward()
    assert param.grad.tolist() == [3.0, 3.0]


def test_frozen_ones_are_none_of_these() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    true = TrueGradients(8.0)
    true.keep([frozen])
    assert not true.has(frozen)


def test_sparse_ones_are_divided() -> None:
    table = nn.Embedding(3, 1, sparse=True)
    loss = table(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    true = TrueGradients(8.0)
    true.keep([table.weight])
    (loss * 8.0).backward()
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 2.0, 0.0]
