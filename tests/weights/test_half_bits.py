"""Half tensors are told from others by their bits, many at once; a write changes the bits."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support import allocations
from torch import Tensor, nn

from amp_patch.gradients.gradient_offer import GradientOffer
from amp_patch.weights.half_bits import (
    bits_of,
    can_be_compared,
    compared,
    have_same_bits,
    sum_of_bits,
)
from amp_patch.weights.lazy_gradients import LazyGradParameter

HALVES = [torch.float16, torch.bfloat16]
#: Small ones and large ones, and where one becomes the other.
SIZES = [1, 3, 1021, 4083, 4084, 4085, 9000]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1])
def test_bits_of_large_tensors_are_compared(dtype: torch.dtype, start: int) -> None:
    memory = torch.arange(2049, dtype=torch.float32).to(dtype)
    tensor = memory[start : start + 2048]
    same = tensor.clone()
    assert have_same_bits(same, tensor) is (start == 0)  # else torch is left to compare numbers
    for place, number in ((0, -0.0), (2047, 3.0), (5, float("nan"))):
        other = tensor.clone()
        other[place] = number
        assert not have_same_bits(other, tensor)
    assert not have_same_bits(same[:8], tensor[:8])  # few


class _Named(nn.Parameter):
    """A script's own, which changes no call of torch."""


class _Own(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class _Dispatching(nn.Parameter):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@pytest.mark.parametrize("kind", [nn.Parameter, LazyGradParameter, _Named])
def test_values_of_classes_that_change_no_call_are_compared_with_the_others(
    kind: type[nn.Parameter],
) -> None:
    values = [kind(torch.full((size,), 0.1)) for size in SIZES]
    pairs: list[tuple[Tensor, Tensor]] = [(value, value.detach().half()) for value in values]
    pairs[2][1][0] = 7.5
    assert all(can_be_compared(*pair) for pair in pairs)
    assert compared(pairs) == [row != 2 for row in range(len(pairs))]


def test_a_master_that_asks_for_its_gradient_is_compared_with_the_others() -> None:
    half, value = nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(3))
    giver = Mock()
    offer = GradientOffer(giver)
    offer.make([half], [value])
    assert type(value) is not nn.Parameter
    assert can_be_compared(value, half)
    offer.withdraw()


@pytest.mark.parametrize("kind", [_Own, _Dispatching])
def test_what_computes_in_a_way_of_its_own_is_not_compared(kind: type[nn.Parameter]) -> None:
    value = torch.ones(3).as_subclass(kind)
    assert not can_be_compared(value, torch.ones(3).half())


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[tuple[Tensor, Tensor]], list[bool]]:
    """Draw values with half tensors, of which some have one number written, and which these are."""
    count = draw(st.integers(0, 6))
    pairs, are_alike = [], []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        value = torch.randn(draw(st.sampled_from(SIZES)), generator=generator)
        half = value.to(draw(st.sampled_from(HALVES)))
        if draw(st.booleans()) and value.dim() and len(value) % 3 == 0:
            value, half = value.view(-1, 3).T, half.view(-1, 3).T  # not contiguous
        is_written = draw(st.booleans()) and half.numel() > 0
        if is_written:
            place = draw(st.integers(0, half.numel() - 1))
            flat = half.T if half.dim() == 2 else half
            flat.reshape(-1)[place] = 7.5
        pairs.append((value, half))
        are_alike.append(not is_written)
    return pairs, are_alike


@given(drawn())
def test_each_tensor_that_was_written_to_is_found(
    case: tuple[list[tuple[Tensor, Tensor]], list[bool]],
) -> None:
    pairs, are_alike = case
    assert all(can_be_compared(*pair) for pair in pairs)
    assert compared(pairs) == are_alike


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", HALVES)
def test_zeros_of_either_sign_differ_where_bits_are_compared(dtype: torch.dtype, size: int) -> None:
    value = torch.ones(size)
    value[size // 2] = 0.0
    half = value.to(dtype)
    half[size // 2] = -0.0
    assert compared([(value, half), (value, value.to(dtype))]) == [False, True]


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_are_compared_within_autocast(dtype: torch.dtype) -> None:
    value = nn.Parameter(torch.randn(2, 5))
    half = nn.Parameter(value.detach().to(dtype))
    scalar = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(2.0).to(dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert compared([(value, half), scalar]) == [True, True]


def test_what_cannot_be_compared() -> None:
    value, half = torch.ones(4), torch.ones(4).half()
    assert can_be_compared(value, half)
    assert not can_be_compared(torch.ones(5), half)
    assert not can_be_compared(torch.ones(4, device="meta"), half)
    assert not can_be_compared(value.double(), half)
    assert not can_be_compared(value, half.float())  # the model was widened
    assert not can_be_compared(value, half.to_sparse())
    freed = torch.ones(4).half()
    freed.untyped_storage().resize_(0)
    assert not can_be_compared(value, freed)


@pytest.mark.parametrize("size", [2, 4083, 4084, 9000])
@pytest.mark.parametrize("dtype", HALVES)
def test_bits_change_with_a_number_a_sign_and_the_order(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(1, size + 1).div(256).to(dtype)
    before = bits_of(tensor)
    assert torch.equal(bits_of(tensor.clone()), before)
    turned = tensor.flip(0)
    for write in (
        lambda: tensor[-1].add_(1),
        lambda: tensor[0].neg_(),
        lambda: tensor.copy_(turned),
    ):
        kept = tensor.clone()
        write()
        assert not torch.equal(bits_of(tensor), before)
        tensor.copy_(kept)
        assert torch.equal(bits_of(tensor), before)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("size", [*SIZES, 9001, 9002, 9003])
def test_a_write_changes_what_bits_add_to(dtype: torch.dtype, start: int, size: int) -> None:
    tensor = torch.randn(start + size).to(dtype)[start:]
    for place in (0, size // 2, size - 1):
        before, bits = sum_of_bits(tensor), bits_of(tensor) if dtype in HALVES else None
        assert sum_of_bits(tensor.clone()).equal(before)  # wherever it lies
        tensor[place] += 7.5
        assert not sum_of_bits(tensor).equal(before)
        assert bits is None or not bits_of(tensor).equal(bits)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    "write", [Tensor.neg_, lambda part: part.mul_(2), lambda part: part.fill_(1.0)]
)
def test_what_each_second_number_is_changed_by_is_seen(dtype: torch.dtype, write: Any) -> None:
    """Bits beyond the 64th are not lost, which would be all that such a write changes."""
    tensor = torch.full((128, 64), 0.5, dtype=dtype)
    before = sum_of_bits(tensor)
    write(tensor[:, 1::2])
    assert not sum_of_bits(tensor).equal(before)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_another_order_of_memory_changes_no_sum(dtype: torch.dtype) -> None:
    images = torch.randn(8, 3, 15, 16).to(dtype)
    assert sum_of_bits(images.to(memory_format=torch.channels_last)).equal(sum_of_bits(images))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
def test_to_add_up_the_bits_copies_no_large_tensor(dtype: torch.dtype, size: int) -> None:
    tensor = torch.ones(size, dtype=dtype)
    assert max(allocations(tensor.clone)) >= size * tensor.element_size()
    assert max(allocations(lambda: sum_of_bits(tensor))) <= 8 << 17
    if dtype in HALVES:
        assert max(allocations(lambda: bits_of(tensor))) < 1 << 16
