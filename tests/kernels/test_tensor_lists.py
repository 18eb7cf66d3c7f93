"""Lists are split by device and dtype, and the numbers of any gradient are found."""

import torch
from drawn_tensors import (
    COPIED,
    REAL,
    Pair,
    numbers,
    sparse_tensors,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.kernels.tensor_lists import alike, dense, fills_memory


@given(COPIED)
def test_alike_keeps_rows_together(pair: Pair) -> None:
    sources, made = pair
    rows = set()
    for ours, theirs in alike(sources, made):
        assert len({tensor.dtype for tensor in ours}) == 1
        assert len({tensor.dtype for tensor in theirs}) == 1
        rows |= {(id(a), id(b)) for a, b in zip(ours, theirs, strict=True)}
    assert rows == {(id(a), id(b)) for a, b in zip(sources, made, strict=True)}


def test_lists_of_one_kind_are_one_group() -> None:
    ones, others = [torch.ones(1), torch.ones(2)], [torch.ones(1).half(), torch.ones(2).half()]
    assert alike(ones, others) == [(ones, others)]
    assert alike([], []) == []
    assert alike(ones[:1], others[:1]) == [(ones[:1], others[:1])]


def test_groups_are_in_the_order_of_their_first_tensors() -> None:
    one, half, other = torch.ones(1), torch.ones(1).half(), torch.ones(2)
    groups = [list(map(id, group)) for (group,) in alike([one, half, other])]
    assert groups == [[id(one), id(other)], [id(half)]]
    on_meta = torch.ones(1, device="meta")
    assert len(alike([one, on_meta])) == 2


@given(st.lists(tensors() | sparse_tensors(REAL), max_size=6))
def test_values_are_dense_real_views_of_the_same_memory(grads: list[Tensor]) -> None:
    for grad, found in zip(grads, dense(grads), strict=True):
        assert torch.equal(found, numbers(grad))
        assert found.untyped_storage().data_ptr() == numbers(grad).untyped_storage().data_ptr()
        assert not found.is_sparse
        assert not found.is_complex()


def test_a_list_that_is_dense_and_real_is_returned_itself() -> None:
    ones = [torch.ones(1), torch.ones(2).half()]
    assert dense(ones) is ones


@given(st.permutations(range(3)), st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)))
def test_a_view_is_dense_where_torch_says_so(
    order: list[int], sliced: set[int], first: set[int]
) -> None:
    tensor = torch.zeros(2, 3, 4).permute(order)
    for dim in sliced:
        tensor = tensor.narrow(dim, 0, 1 if dim in first else tensor.shape[dim] - 1)
    # torch keeps the strides of a dense tensor, and only of such a one
    keeps = torch.empty_like(tensor).stride() == tensor.stride()
    assert fills_memory(tensor) == keeps
