"""What is asked of large tensors is what torch's own functions say, and takes a strip of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import allocations
from torch import Tensor

from amp_patch.kernels.tensor_values import (
    are_nonfinite,
    count_nonfinite,
    is_any,
    is_infinite,
    largest,
    same_numbers,
)

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: Few numbers and many, in one strip and in more.
SIZES = [1, 3, (1 << 14) + 1, (1 << 17) - 1, (1 << 17) + 4]
ODD = [0.0, -0.0, 1.5, -3.0, 6e-8, 65504.0, INF, -INF, NAN]


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Draw zeros of one sign, or numbers, and put a few others among them."""
    size, dtype = draw(st.sampled_from(SIZES)), draw(st.sampled_from(DTYPES))
    start = torch.randn(size) if draw(st.booleans()) else torch.full((size,), -0.0)
    for _ in range(draw(st.integers(0, 3))):
        start[draw(st.integers(0, size - 1))] = draw(st.sampled_from(ODD))
    tensor = start.to(dtype)
    is_parted = draw(st.booleans()) and size % 3 == 0
    return tensor.view(-1, 3).t() if is_parted else tensor


@given(numbers())
def test_one_tensor_is_what_torch_says(tensor: Tensor) -> None:
    assert bool(is_any(tensor)) is bool(tensor.any())
    expected = torch.stack([tensor.isinf().sum(), tensor.isnan().sum()])
    torch.testing.assert_close(count_nonfinite(tensor), expected, rtol=0, atol=0)
    assert bool(is_infinite(tensor)) is bool(expected[0])
    assert are_nonfinite(tensor).tolist() == [bool(one) for one in expected]
    wide = torch.float32 if tensor.element_size() == 2 else tensor.dtype
    norm = torch.linalg.vector_norm(tensor.to(wide), INF)
    torch.testing.assert_close(largest(tensor), norm, rtol=0, atol=0, equal_nan=True)
    assert not largest(tensor).signbit()


@given(numbers(), st.sampled_from(DTYPES), st.data())
def test_two_tensors_have_the_numbers_that_torch_says(
    tensor: Tensor, dtype: torch.dtype, data: st.DataObject
) -> None:
    other = tensor.clone()
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, other.numel() - 1))
        where = torch.unravel_index(torch.tensor(place), other.shape)
        other[where] = data.draw(st.sampled_from(ODD))
    other = torch.where(other == 0, -other, other) if data.draw(st.booleans()) else other
    other = other.to(dtype)
    expected = torch.allclose(tensor, other.to(tensor), rtol=0, atol=0, equal_nan=True)
    assert bool(same_numbers(tensor, other)) is expected


@pytest.mark.parametrize("number", [1.0, INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_strip_of_memory_is_enough(dtype: torch.dtype, number: float) -> None:
    large = torch.full((1 << 20,), number, dtype=dtype)
    halves = large.clone() if dtype is torch.float32 else large.float()
    calls: list[Callable[[], Any]] = [
        lambda: is_any(large),
        lambda: count_nonfinite(large),
        lambda: largest(large),
        lambda: same_numbers(large, halves),
    ]
    for call in calls:
        assert max(allocations(call)) <= 4 << 17


def test_what_has_no_order_is_asked_as_ever() -> None:
    assert bool(is_any(torch.ones(1 << 15, dtype=torch.bool)))
    assert not bool(is_any(torch.zeros(1 << 15, dtype=torch.int32)))
    assert bool(same_numbers(torch.ones(1 << 15).long(), torch.ones(1 << 15)))
