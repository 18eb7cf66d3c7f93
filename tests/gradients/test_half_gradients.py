"""Half gradients that wait are unscaled in float32 when asked for, and must not be written to."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import pytest
import torch
from support import allocations
from torch import Tensor

from amp_patch.gradients.half_gradients import HalfGradients, LargeInHalf, UnscaledLater

SCALE = 1024.0


class Checked:
    """Stands for the check of a kernel: it knows the squares, unscaled."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.grads = grads

    def squares_of(self, rows: Sequence[int]) -> list[Tensor]:
        return [torch.cat([self.grads[row].double() / SCALE for row in rows]).square().sum()]


@pytest.fixture
def scaled() -> list[Tensor]:
    """Gradients of 3, of 4 and of the smallest float16, whose float32 no float16 holds."""
    return [torch.tensor([number]).half() for number in (3 * SCALE, 4 * SCALE, 6e-8)]


def half_gradients(scaled: list[Tensor], rows: Sequence[int] = (0, 1, 2)) -> HalfGradients:
    grads = [scaled[row] for row in rows]
    return HalfGradients(grads, SCALE, Checked(scaled), rows)


def test_they_are_unscaled_in_float32_and_stay_as_they_were(scaled: list[Tensor]) -> None:
    before = [grad.clone() for grad in scaled]
    made = half_gradients(scaled).make([2, 0])
    expected = [before[2].float() / SCALE, torch.tensor([3.0])]
    for got, want in zip(made, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert made[0] > 0
    assert all(map(torch.equal, scaled, before))


def test_the_squares_are_of_these_rows_of_the_check(scaled: list[Tensor]) -> None:
    assert half_gradients(scaled, rows=[0, 1]).squares() == [25.0]
    assert half_gradients(scaled, rows=[1]).squares() == [16.0]


def test_a_clip_holds_for_values_and_squares(scaled: list[Tensor]) -> None:
    grads = half_gradients(scaled, rows=[0, 1])
    grads.clip = torch.tensor(0.5)
    assert [made.item() for made in grads.make([0, 1])] == [1.5, 2.0]
    assert grads.squares() == [6.25]


def test_a_write_is_refused_for_the_rows_that_it_went_to(scaled: list[Tensor]) -> None:
    grads = half_gradients(scaled)
    scaled[1].mul_(2)
    assert [made.item() for made in grads.make([0])] == [3.0]
    with pytest.raises(RuntimeError, match="got 1 of 2 written to in place"):
        grads.make([0, 1])
    with pytest.raises(RuntimeError, match="got 1 of 3 written to in place"):
        grads.refuse_written([0, 1, 2])


def test_what_is_unscaled_lies_as_the_masters() -> None:
    half, master = torch.ones(2, 4, dtype=torch.float16), torch.zeros(4, 2).t()
    for source in (UnscaledLater([half], SCALE, [master]), LargeInHalf([half], SCALE, [master])):
        (made,) = source.make([0])
        assert made.stride() == master.stride()
        assert torch.equal(made, half.float() / SCALE)


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_strips_are_unscaled_in_the_memory_of_one(scale: float, dtype: torch.dtype) -> None:
    half, length = torch.randn(1 << 14).to(dtype), 1 << 12
    half[:2] = torch.tensor([6e-8, float("nan")])
    source = LargeInHalf([half], scale, [half.float()])
    strips = [strip.clone() for strip in source.strips(0, length)]
    exact = half.double() / scale
    torch.testing.assert_close(torch.cat(strips), exact.float(), rtol=0, atol=0, equal_nan=True)
    taken = allocations(lambda: collections.deque(source.strips(0, length), maxlen=0))
    assert [size for size in taken if size > length] == [4 * length]
