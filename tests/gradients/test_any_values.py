"""Which gradients are there and not 0: as their numbers say, and by one wait for a device."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from support import CountItems
from torch import Tensor

from amp_patch.gradients import any_values
from amp_patch.gradients.any_values import are_any

NUMBERS = [0.0, -0.0, 1.0, -2.0, float("nan"), float("inf"), 6e-8]


@st.composite
def drawn(draw: st.DrawFn) -> list[Tensor | None]:
    grads: list[Tensor | None] = []
    for _ in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
        numbers = draw(st.lists(st.sampled_from(NUMBERS), max_size=4))
        grad = torch.tensor(numbers, dtype=dtype)
        kind = draw(st.sampled_from(["dense", "sparse", "none"]))
        grads.append({"dense": grad, "sparse": grad.to_sparse(), "none": None}[kind])
    return grads


@given(drawn())
def test_those_that_are_there_and_not_0_are_found(grads: list[Tensor | None]) -> None:
    dense = [None if one is None else one.to_dense().double() for one in grads]
    by_number = [one is not None and any(n != 0 for n in one.tolist()) for one in dense]
    assert are_any(grads) == by_number


def test_numbers_of_many_are_read_together() -> None:
    with CountItems() as items:
        are_any([torch.ones(2), None, torch.zeros(3)])
    assert items.count == 0  # `tolist` of one tensor


def test_while_a_graph_is_captured_none_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_values.captures, "are_made", lambda device: True)
    assert are_any([torch.zeros(2), None]) == [True, False]
