"""Comparisons of tensors with their copies, by all implementations."""

from typing import Any

import numpy as np
import pytest
import torch
from drawn_tensors import (
    COPIED,
    INF,
    NAN,
    Operations,
    Pair,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.kernels import torch_comparison, torch_kernels
from amp_patch.tools.sweep.memory import LivingTensors


def assert_a_write_is_seen(comparison: Any, written: Tensor, data: st.DataObject) -> None:
    where = np.unravel_index(data.draw(st.integers(0, written.numel() - 1)), written.shape)
    old = written[where].clone()
    written[where] = old * 2 + 1 if abs(old + 1) > 0.01 else 5.0
    assert comparison.differs()
    written[where] = old
    assert not comparison.differs()


@given(COPIED, st.data())
def test_comparison_sees_every_written_element(
    ops: Operations, pair: Pair, data: st.DataObject
) -> None:
    sources, made = map(ops.place, pair)
    comparison = ops.module.Comparison(sources, made)
    assert not comparison.differs()
    filled = [index for index, tensor in enumerate(made) if tensor.numel()]
    if not filled:
        return
    index = data.draw(st.sampled_from(filled))
    assert_a_write_is_seen(comparison, data.draw(st.sampled_from([sources, made]))[index], data)


def test_comparison_of_large_tensors_sees_the_last_element(ops: Operations) -> None:
    source = torch.zeros(torch_comparison._LEAST + 1)
    half = source.half()
    comparison = ops.module.Comparison([source, torch.zeros(2)], [half, torch.zeros(2).half()])
    assert not comparison.differs()
    half[-1] = 1.0
    assert comparison.differs()


@pytest.mark.parametrize(("count", "kept"), [(4, 4), (6, 5), (512, 8), (800, 10)])
def test_what_is_kept_of_copies_has_a_bound(
    ops: Operations, monkeypatch: pytest.MonkeyPatch, count: int, kept: int
) -> None:
    """A 64th of all elements, at least 5 and at most 10 copies' here."""
    if ops.module is not torch_kernels:
        pytest.skip("kernels keep nothing")
    monkeypatch.setattr(torch_comparison, "_LEAST", 5 * 8)
    monkeypatch.setattr(torch_comparison, "_MOST", 10 * 8)
    sources = [torch.randn(8) for _ in range(count)]
    comparison = torch_comparison.Comparison(sources, [source.half() for source in sources])
    comparison.note_equal()
    assert sum(memory.nbytes for memory in comparison._memory) == 2 * 8 * kept
    assert not comparison.differs()


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (8, 3, 1, 2), (15, 15, 2, 2)])
@pytest.mark.parametrize("are_alike", [True, False])
def test_comparison_in_strips_sees_every_element(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, ...], are_alike: bool
) -> None:
    monkeypatch.setattr(torch_comparison, "_STRIP", 64)
    monkeypatch.setattr(torch_comparison, "_LEAST", 0)
    source = torch.randn(16, 16, 3, 3).to(memory_format=torch.channels_last)
    half = source.half() if are_alike else source.half().contiguous()
    comparison = torch_kernels.Comparison([source], [half])
    comparison.note_equal()
    assert not comparison.differs()
    half[place] += 1
    assert comparison.differs()


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("shape", [(8,), (7,), (3, 4), (3, 5), (4, 1), ()])
@pytest.mark.parametrize("offset", range(5))
def test_comparison_sees_every_element_wherever_a_copy_begins(
    monkeypatch: pytest.MonkeyPatch, offset: int, shape: tuple[int, ...], is_small: bool
) -> None:
    monkeypatch.setattr(torch_comparison, "_LEAST", 1 << 16 if is_small else 0)
    source = torch.randn(shape)
    memory = torch.zeros(offset + source.numel() + 1).half()
    half = memory[offset : offset + source.numel()].view(shape).copy_(source)
    whole = torch.randn(4, 4)
    for copy in (half, half.mT.contiguous().mT if half.dim() == 2 else half):
        comparison = torch_kernels.Comparison([source, whole], [copy, whole.half()])
        comparison.note_equal()
        for where in np.ndindex(shape):
            assert not comparison.differs()
            copy[where] += 1
            assert comparison.differs()
            copy[where] = source[where]


def test_comparison_casts_a_strip_at_a_time() -> None:
    source = torch.randn(1 << 21)
    comparison = torch_kernels.Comparison([source], [source.half()])
    with LivingTensors() as living:
        before = living.peak
        comparison.differs()
    assert 0 < living.peak - before <= (1 << 19) + 8  # a strip, and how many of it differ


def test_comparison_sees_nan_as_equal_to_itself(ops: Operations) -> None:
    source = torch.tensor([NAN])
    half = source.half()
    comparison = ops.module.Comparison([source], [half])
    assert not comparison.differs()
    half[0] = 1.0
    assert comparison.differs()


@given(COPIED, st.data())
def test_comparison_after_a_note_sees_what_is_written_to_a_copy(
    ops: Operations, pair: Pair, data: st.DataObject
) -> None:
    sources, made = map(ops.place, pair)
    comparison = ops.module.Comparison(sources, made)
    for source, copy in zip(sources, made, strict=True):
        source.mul_(-2).add_(1)
        copy.copy_(source)
    comparison.note_equal()
    assert not comparison.differs()
    for copy in made:
        if copy.numel():
            where = np.unravel_index(data.draw(st.integers(0, copy.numel() - 1)), copy.shape)
            old = copy[where].clone()
            copy[where] = 5.0 if old != 5.0 else 6.0
            assert comparison.differs()
            copy[where] = old
            assert not comparison.differs()


@given(COPIED, st.data())
def test_comparison_that_has_forgotten_sees_what_is_written_to_either(
    ops: Operations, pair: Pair, data: st.DataObject
) -> None:
    sources, made = map(ops.place, pair)
    comparison = ops.module.Comparison(sources, made)
    comparison.note_equal()
    comparison.forget()
    assert not comparison.differs()
    for written in (*sources, *made):
        if written.numel():
            assert_a_write_is_seen(comparison, written, data)


def test_a_source_that_is_not_flat_is_compared_alone(ops: Operations) -> None:
    source, flat = torch.randn(3, 4).T, torch.randn(5)
    made = [source.half().contiguous(), flat.half()]
    comparison = ops.module.Comparison([source, flat], made)
    assert not comparison.differs()
    for written in (source, made[0]):
        old = written[2, 1].clone()
        written[2, 1] = 9.0
        assert comparison.differs()
        written[2, 1] = old


def test_small_copies_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [torch.randn(4) for _ in range(9)]
    made = [source.half() for source in sources[:5]] + [one.bfloat16() for one in sources[5:]]
    comparison = torch_comparison.Comparison(sources, made)
    looked: list[int] = []
    look = torch_comparison._have_other_bits
    monkeypatch.setattr(
        torch_comparison, "_have_other_bits", lambda *both: looked.append(1) or look(*both)
    )
    with torch.autocast("cpu", torch.bfloat16):  # which puts no tensors in float16 together
        assert not comparison.differs()
    assert len(looked) == 2  # of either dtype
    made[7][3] = 5.0
    assert comparison.differs()


@pytest.mark.parametrize("gap", [0, 1, 200])
def test_comparison_reads_copies_that_share_a_memory_at_once(ops: Operations, gap: int) -> None:
    memory = torch.zeros(20 + gap).half()
    made = [memory[:8].view(2, 4), memory[10:20]]
    sources = [torch.randn_like(copy, dtype=torch.float32) for copy in made]
    for source, copy in zip(sources, made, strict=True):
        copy.copy_(source)
    comparison = ops.module.Comparison(sources, made)
    comparison.note_equal()
    # a memory that holds much else is not read as a whole
    assert [len(part) for part in comparison._together] == [2 if gap == 200 else 1]
    for element in (made[0][1, 3], made[1][9]):
        old = element.clone()
        element.add_(1)
        assert comparison.differs()
        element.copy_(old)
        assert not comparison.differs()


@given(COPIED, st.lists(st.booleans(), min_size=8, max_size=8), st.data())
def test_reconcile_lets_one_of_the_two_follow(
    ops: Operations,
    pair: Pair,
    wins: list[bool],
    data: st.DataObject,
) -> None:
    sources, made = map(ops.place, pair)
    wins = wins[: len(made)]
    comparison = ops.module.Comparison(sources, made)
    if data.draw(st.booleans()):
        comparison.note_equal()
    for copy in made:
        if copy.numel() and data.draw(st.booleans()):
            where = np.unravel_index(data.draw(st.integers(0, copy.numel() - 1)), copy.shape)
            copy[where] = data.draw(st.sampled_from([3.0, -0.0, INF]))
    expected = []
    for source, copy, win in zip(sources, made, wins, strict=True):
        same = bits(source.to(copy.dtype)) == bits(copy)
        exact = source if win else torch.where(same, source, copy.to(source.dtype))
        expected.append((exact.clone(), exact.to(copy.dtype)))
    differs = comparison.reconcile(lambda: wins)
    assert differs in (False, True)
    for source, copy, (exact, rounded_one) in zip(sources, made, expected, strict=True):
        assert torch.equal(bits(source), bits(exact))
        assert torch.equal(bits(copy), bits(rounded_one))
    assert not comparison.differs()


@pytest.mark.parametrize("wins", [False, True])
def test_reconcile_tells_zeros_of_different_signs_apart(ops: Operations, wins: bool) -> None:
    source, copy = torch.tensor([-1e-30, 1e-30]), torch.tensor([0.0, -0.0]).half()
    ops.module.Comparison([source], [copy]).reconcile(lambda: [wins])
    assert (source != 0).tolist() == [wins, wins]
    assert source.signbit().tolist() == copy.signbit().tolist() == [wins, not wins]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def test_the_reference_asks_who_wins_only_where_something_differs() -> None:
    source, copy = torch.ones(3), torch.ones(3).half()
    comparison = torch_kernels.Comparison([source], [copy])
    assert comparison.reconcile(lambda: pytest.fail("asked")) is False
    copy[1] = 2.0
    assert comparison.reconcile(lambda: [False]) is True
    assert source.tolist() == [1.0, 2.0, 1.0]
