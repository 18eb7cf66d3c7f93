"""Unscaling, adding and casting against float64 arithmetic of numpy, by all implementations."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from drawn_tensors import (
    GRADS,
    GRADS_WITH_BAD_VALUES,
    INF,
    NAN,
    POWERS,
    REAL,
    SCALES,
    Operations,
    copies,
    doubles,
    kinds_in,
    numbers,
    rounded,
    sparse_tensors,
    tensors,
    tolerance,
    with_bad_values,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


@pytest.fixture
def wide_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- unscale ---


@given(GRADS_WITH_BAD_VALUES, SCALES)
def test_unscale_in_place_divides_and_flags(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    before = [doubles(grad) for grad in grads]
    check = ops.unscale(grads, grads, scale)
    after = [doubles(grad) for grad in grads]
    for grad, old in zip(grads, before, strict=True):
        expected = rounded(old / scale, grad.dtype)
        torch.testing.assert_close(
            numbers(grad), expected, equal_nan=True, **tolerance(expected.dtype)
        )
    expected_kinds = [(i, kinds_in(new)) for i, new in enumerate(after) if kinds_in(new)]
    assert check.nonfinite() == expected_kinds
    assert check.overflow == bool(expected_kinds)
    assert all(ours is given for ours, given in zip(check.grads, grads, strict=True))


@given(with_bad_values(st.lists(tensors(REAL[:3]), max_size=6)), SCALES)
def test_unscale_into_fp32_loses_nothing(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    before = copies(grads)
    masters = [torch.full_like(grad, 77.0, dtype=torch.float32) for grad in grads]
    check = ops.unscale(grads, masters, scale)
    inverse = np.float64(np.float32(1.0 / np.float64(np.float32(scale))))
    for grad, old, master in zip(grads, before, masters, strict=True):
        assert torch.equal(numbers(grad).nan_to_num(1.0), numbers(old).nan_to_num(1.0))
        expected = rounded(doubles(old) * inverse, torch.float32)
        torch.testing.assert_close(master, expected, rtol=0, atol=0, equal_nan=True)
    assert check.overflow == any(kinds_in(doubles(grad)) for grad in grads)


@given(st.lists(sparse_tensors(REAL[:2]), min_size=1, max_size=3), POWERS)
def test_unscale_receives_a_sparse_gradient(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    masters = [grad.to(torch.float32) for grad in grads]
    numbers(masters[0]).zero_()
    check = ops.unscale(grads, masters, scale)
    for grad, master in zip(grads, masters, strict=True):
        expected = rounded(doubles(grad) / scale, torch.float32)
        assert torch.equal(numbers(master), expected)
    assert not check.overflow


def test_fp16_that_would_flush_to_zero_survives_in_fp32(ops: Operations) -> None:
    grad = torch.tensor([2.0**-24], dtype=torch.float16)
    master = torch.empty(1)
    ops.unscale([grad], [master], 2.0**16)
    assert master.item() == 2.0**-40


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 4e4), (torch.float32, 3e38)])
def test_what_overflows_only_when_unscaled_is_flagged(
    ops: Operations, dtype: torch.dtype, value: float, on_device: bool
) -> None:
    grad = torch.tensor([1.0, value], dtype=dtype)
    check = ops.unscale([grad], [grad], torch.tensor(2.0**-4) if on_device else 2.0**-4)
    assert check.overflow
    assert check.nonfinite() == [(0, "inf")]


def test_bfloat16_that_overflows_only_in_its_master_is_flagged(ops: Operations) -> None:
    grad, master = torch.tensor([3e38], dtype=torch.bfloat16), torch.empty(1)
    assert ops.unscale([grad], [master], 0.5).overflow


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_unscale_tells_inf_from_nan(ops: Operations, scale: float) -> None:
    bad = [[1.0, 2.0], [INF, 1.0], [NAN, 1.0], [-INF, NAN]]
    grads = [torch.tensor(values) for values in bad]
    check = ops.unscale(grads, grads, scale)
    assert check.nonfinite() == [(1, "inf"), (2, "NaN"), (3, "inf and NaN")]


def test_a_clean_list_after_a_bad_one_is_clean(ops: Operations) -> None:
    assert ops.unscale([torch.tensor([NAN])], [torch.empty(1)], 2.0).overflow
    assert not ops.unscale([torch.tensor([1.0])], [torch.empty(1)], 2.0).overflow


@given(GRADS_WITH_BAD_VALUES, GRADS_WITH_BAD_VALUES, SCALES)
def test_unscale_again_is_that_of_other_values(
    ops: Operations, first: list[Tensor], second: list[Tensor], scale: float
) -> None:
    first, second = ops.place(first), ops.place(second)
    kinds = [torch.empty_like(grad) for grad in second]
    expected = copies(second)
    check = ops.unscale(expected, expected, scale)
    again = ops.module.Unscale(kinds, kinds)
    for grads in (copies(second), second):
        ours = again.run(grads, grads, scale)
        assert (ours.overflow, ours.nonfinite()) == (check.overflow, check.nonfinite())
    for grad, other in zip(second, expected, strict=True):
        assert torch.equal(numbers(grad).nan_to_num(7.0), numbers(other).nan_to_num(7.0))


@given(st.sampled_from([1.0, INF, NAN]), st.sampled_from([0.5, 2.0]))
def test_unscale_multiplies_and_checks_the_memory_that_targets_share(
    ops: Operations, value: float, scale: float
) -> None:
    sources = [torch.tensor([value, 2.0]).half(), torch.tensor([3.0]).half()]
    memory = torch.zeros(4)
    targets = [memory[:2], memory[3:]]
    check = ops.module.Unscale(sources, targets).run(sources, targets, scale, [[memory]])
    expected = torch.tensor([value / scale, 2.0 / scale, 0.0, 3.0 / scale])
    torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)
    assert check.overflow == (value != 1.0)
    assert [index for index, _ in check.nonfinite()] == [0] * (value != 1.0)


def test_flags_norms_and_factors_are_float32_whatever_the_default_dtype(
    ops: Operations, wide_default: None
) -> None:
    for scale in (2.0, torch.tensor(2.0, dtype=torch.float32)):
        grads = [torch.tensor([1.0, value], dtype=torch.float32) for value in (3.0, INF)]
        for clean, some in ((True, grads[:1]), (False, grads)):
            check = ops.unscale(some, some, scale)
            assert [flag.dtype for flag in check.found_inf] == [torch.float32]
            assert check.overflow != clean
        assert grads[0].tolist() == [0.25, 0.75]
    grads = [torch.full((4,), 3.0, dtype=torch.float32)]
    for some, norm in ((grads, 6.0), ([], 0.0)):
        total = ops.module.clip_by_norm(some, 2.0, 2.0)
        assert (total.item(), total.dtype) == (norm, torch.float32)
    torch.testing.assert_close(grads[0], torch.ones(4, dtype=torch.float32))


def test_unscale_of_nothing_finds_nothing(ops: Operations) -> None:
    check = ops.unscale([], [], 4.0)
    assert (check.overflow, check.nonfinite(), check.grads) == (False, [], [])


@given(GRADS_WITH_BAD_VALUES, SCALES, st.booleans())
def test_a_scale_in_a_tensor_is_as_one_in_a_number(
    ops: Operations, grads: list[Tensor], scale: float, into_fp32: bool
) -> None:
    grads = ops.place(grads)
    targets = [
        grad.to(torch.float32) if into_fp32 and not grad.is_complex() else grad.clone()
        for grad in grads
    ]
    expected = copies(targets)
    check = ops.unscale(copies(grads), expected, scale)
    ours = ops.unscale(grads, targets, torch.tensor(scale))
    assert (ours.overflow, ours.nonfinite()) == (check.overflow, check.nonfinite())
    for target, other in zip(targets, expected, strict=True):
        assert torch.equal(numbers(target).nan_to_num(7.0), numbers(other).nan_to_num(7.0))


@given(GRADS, SCALES)
def test_the_norm_of_a_check_is_that_of_what_was_unscaled(
    ops: Operations, grads: list[Tensor], scale: float
) -> None:
    grads = ops.place(grads)
    check = ops.unscale(grads, grads, scale)
    # entries of one index of a sparse tensor count as their sum, so a norm in half is not exact
    dense = [grad.to(torch.complex128).to_dense().cpu().numpy().ravel() for grad in grads]
    expected = np.linalg.norm(np.abs(np.concatenate([np.zeros(1), *dense])))
    norm = check.norm()
    assert norm.shape == ()
    if np.isfinite(expected) and expected < 1e18:
        assert norm.item() == pytest.approx(expected, rel=1e-5, abs=1e-18)


@given(with_bad_values(st.lists(tensors(REAL[:3]) | sparse_tensors(REAL[:2]), max_size=6)))
def test_a_copy_is_what_a_scale_of_one_gives(ops: Operations, grads: list[Tensor]) -> None:
    grads = ops.place(grads)
    expected, targets = ([grad.to(torch.float32, copy=True) for grad in grads] for _ in range(2))
    for target in targets:
        numbers(target).zero_()
    found = ops.module.Unscale(grads, targets).copy(grads, targets).grads
    for ours, target, wide in zip(found, targets, expected, strict=True):
        assert ours is target
        torch.testing.assert_close(numbers(ours), numbers(wide), rtol=0, atol=0, equal_nan=True)


def test_a_number_scale_is_rounded_as_a_multiplied_loss_is(ops: Operations) -> None:
    scale = 65536.3  # its inverse is another one once it is rounded
    grad, inverse = torch.ones(1), (1.0 / torch.tensor(scale).double()).float()
    assert inverse.item() != torch.tensor(1.0 / scale).item()
    ops.unscale([grad], [grad], scale)
    assert grad.item() == inverse.item()


def test_what_is_written_counts_as_written(ops: Operations) -> None:
    grad, target, half = torch.ones(3), torch.zeros(3), torch.zeros(3).half()
    versions = [one._version for one in (grad, target, half)]
    ops.unscale([grad], [target], 2.0)
    ops.module.Cast([grad], [half]).run()
    ops.module.accumulate([target], [grad])
    assert grad._version == versions[0]
    assert target._version > versions[1] + 1
    assert half._version > versions[2]


# --- accumulate and cast ---


@given(st.lists(tensors(), max_size=6))
def test_accumulate_adds(ops: Operations, targets: list[Tensor]) -> None:
    targets = ops.place(targets)
    others = [torch.randn_like(target) for target in targets]
    expected = [target + other for target, other in zip(targets, others, strict=True)]
    sums = [doubles(t) + doubles(o) for t, o in zip(targets, others, strict=True)]
    ops.module.accumulate(targets, others)
    for target, by_torch, by_numpy in zip(targets, expected, sums, strict=True):
        assert torch.equal(target, by_torch)
        exact = rounded(by_numpy, target.dtype)
        torch.testing.assert_close(numbers(target), exact, **tolerance(exact.dtype))


def test_accumulate_adds_half_to_fp32_in_fp32(ops: Operations) -> None:
    target, other = torch.tensor([1.0]), torch.tensor([2.0**-20], dtype=torch.float16)
    ops.module.accumulate([target], [other])
    assert target.item() == 1.0 + 2.0**-20


@given(st.lists(tensors(REAL), max_size=6), st.lists(st.sampled_from(REAL), min_size=6))
def test_cast_rounds_once(
    ops: Operations, sources: list[Tensor], dtypes: list[torch.dtype]
) -> None:
    sources = ops.place(sources)
    targets = [
        torch.full_like(source, 5.0, dtype=dtype)
        for source, dtype in zip(sources, dtypes, strict=False)
    ]
    cast = ops.module.Cast(sources, targets)
    cast.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, rounded(doubles(source), target.dtype).reshape(target.shape))
        source.mul_(2)
    cast.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_empty_lists_are_all_right(ops: Operations) -> None:
    ops.module.accumulate([], [])
    ops.module.Cast([], []).run()
