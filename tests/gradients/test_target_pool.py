"""Small half gradients on a CPU: unscaled in one memory, which no one else may hold."""

import math

import pytest
import torch
from torch import Tensor

from amp_patch.gradients.gradient_buffers import GradientBuffers
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.target_pool import TargetPool

SCALE = 4.0
SIZES = (3, 2)


@pytest.fixture
def buffers() -> GradientBuffers:
    halves = [torch.zeros(size, dtype=torch.float16) for size in SIZES]
    return GradientBuffers(ParamPairs(halves, [torch.zeros(size) for size in SIZES]))


@pytest.fixture
def pool(buffers: GradientBuffers) -> TargetPool:  # which live as long: they count as its owner
    assert buffers.pool is not None
    return buffers.pool


def halves_of(value: float) -> list[Tensor]:
    return [torch.full((size,), value, dtype=torch.float16) for size in SIZES]


def numbers(tensors: list[Tensor]) -> set[float]:
    return {number for tensor in tensors for number in tensor.tolist()}


@pytest.mark.parametrize("shows", [True, False])
def test_gradients_are_unscaled_and_shown(pool: TargetPool, shows: bool) -> None:
    for _ in range(2):
        grads = halves_of(8.0)
        check = pool.take(grads, SCALE, shows=shows)
        assert check is not None
        assert not check.overflow
        assert pool.are_targets(check.grads)
        assert numbers(check.grads) == {2.0}
        assert numbers(grads) == {2.0 if shows else 8.0}
        del check


def test_later_passes_are_added_in_each_step(pool: TargetPool) -> None:
    for _ in range(2):
        first = pool.take(halves_of(8.0), SCALE, shows=True)
        assert first is not None
        targets = first.grads
        for already in (2.0, 5.0):
            grads = halves_of(12.0)
            more = pool.take_more(grads, SCALE)
            assert more is not None
            assert numbers(more.grads) == {3.0}
            pool.show(grads)
            assert numbers(targets) == numbers(grads) == {already + 3.0}
            del more
        del first, targets


def test_a_later_pass_that_overflows_is_found(pool: TargetPool) -> None:
    pool.take(halves_of(8.0), SCALE, shows=True)
    check = pool.take_more(halves_of(math.inf), SCALE)
    assert check is not None
    assert check.overflow


def test_where_no_overflow_counts_nothing_is_checked(pool: TargetPool) -> None:
    check = pool.take(halves_of(math.inf), None, shows=True)
    assert check is not None
    assert check.found_inf == []
    assert numbers(check.grads) == {math.inf}


def test_what_somebody_holds_is_not_written_to(pool: TargetPool) -> None:
    check = pool.take(halves_of(8.0), SCALE, shows=True)
    assert check is not None
    held = check.grads[0]
    del check
    assert pool.take(halves_of(16.0), SCALE, shows=True) is None
    assert numbers([held]) == {2.0}


@pytest.mark.parametrize("scale", [0.5, torch.tensor(4.0)])
def test_another_scale_is_left_to_others(pool: TargetPool, scale: float | Tensor) -> None:
    assert pool.take(halves_of(8.0), scale, shows=True) is None


def test_sparse_gradients_are_left_to_others(pool: TargetPool) -> None:
    grads = [grad.to_sparse() for grad in halves_of(8.0)]
    assert pool.take(grads, SCALE, shows=True) is None


def test_fp32_gradients_are_unscaled_where_they_are_and_told_of_in_the_order_of_all() -> None:
    params = [torch.zeros(2, dtype=dtype) for dtype in (torch.float16, torch.float32) * 2]
    buffers = GradientBuffers(ParamPairs(params, [one.float() for one in params]))
    assert buffers.pool is not None
    for first in (8.0, math.inf):
        grads = [torch.full_like(param, 8.0) for param in params]
        grads[1].fill_(first)
        check = buffers.pool.take(grads, SCALE, shows=True)
        assert check is not None
        assert check.grads[1] is grads[1]
        assert check.grads[3] is grads[3]
        assert [grad.tolist() for grad in check.grads] == [
            [first / SCALE if row == 1 else 2.0] * 2 for row in range(4)
        ]
        assert check.nonfinite() == ([(1, "inf")] if math.isinf(first) else [])
        assert numbers([grads[0], grads[2], grads[3]]) == {2.0}
        del check


@pytest.mark.parametrize("other", [torch.float64, torch.float16])
def test_parameters_of_other_dtypes_that_are_stepped_themselves_have_none(
    other: torch.dtype,
) -> None:
    own, half = torch.zeros(2, dtype=other), torch.zeros(2, dtype=torch.float16)
    assert GradientBuffers(ParamPairs([half, own], [half.float(), own])).pool is None


def test_large_masters_and_parameters_that_are_stepped_themselves_have_none() -> None:
    large = [torch.zeros(1 << 20, dtype=torch.float16)]
    assert GradientBuffers(ParamPairs(large, [one.float() for one in large])).pool is None
    plain = [torch.zeros(2)]
    assert GradientBuffers(ParamPairs(plain, plain)).pool is None
