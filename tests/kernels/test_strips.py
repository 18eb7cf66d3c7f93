"""Strips of tensors: their memory, each number once, and only where all lie alike."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.kernels.strips import Strips, cut, lie_alike, strip_length

SHAPES = st.lists(st.integers(1, 7), max_size=4)


@given(SHAPES, st.randoms(use_true_random=False), st.integers(1, 200))
def test_a_tensor_in_any_order_of_its_dimensions_is_cut_into_all_of_its_memory(
    shape: list[int], random: Random, length: int
) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    count = torch.Size(shape).numel()
    whole = torch.arange(count + 10.0)
    tensor = whole[10:].view(shape).permute(order)
    assert lie_alike([tensor, torch.empty_like(tensor)])
    pieces = list(cut(tensor, length))
    assert torch.equal(torch.cat(pieces), torch.arange(10.0, count + 10.0))
    assert {piece.numel() for piece in pieces[:-1]} <= {length}
    for piece in pieces:
        piece.neg_()
    assert torch.equal(tensor.sum(), -torch.arange(10.0, count + 10.0).sum())


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(3, 4), torch.ones(4, 3).t()],
        [torch.ones(4, 8), torch.ones(2, 8)],
        [torch.ones(4, 8)[:, ::2]] * 2,
        [torch.ones(4, 1).expand(4, 3)] * 2,
        [torch.ones(3, 4)[:, :3]] * 2,
        [torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)],
    ],
    ids=["transposed", "of fewer rows", "with gaps", "expanded", "a part", "channels last"],
)
def test_what_lies_otherwise_is_not_cut(tensors: list[Tensor]) -> None:
    assert not lie_alike(tensors)


@given(st.integers(0, 10**10), st.integers(64, 10**7))
def test_strips_are_about_as_long_as_asked_for(elements: int, about: int) -> None:
    length = strip_length(elements, about)
    if length is None:
        assert elements <= 1.5 * about
    else:
        assert length % 64 == 0  # or the end of a strip would be rounded as the end of a tensor
        assert 0.6 * about <= length <= 1.25 * about + 64


def test_rows_of_strips_leave_a_column_that_is_not_there_empty() -> None:
    param, grad, other = torch.zeros(5), torch.arange(5.0), torch.ones(5)
    rows = list(Strips(3, iter(grad.split(3))).rows(param, None, other))
    assert [[len(column) for column in row] for row in rows] == [[1, 1, 0, 1]] * 2
    assert [row[1][0].tolist() for row in rows] == [[0, 1, 2], [3, 4]]
    for row in rows:
        row[0][0].copy_(row[1][0])
    assert torch.equal(param, grad)
