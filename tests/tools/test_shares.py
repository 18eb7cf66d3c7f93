"""A difference is a share of the reference, and of a loss that ends near 0 of what that fell by."""

from __future__ import annotations

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from amp_patch.tools.shares import LEAST, share

numbers = st.floats(-1e6, 1e6)


@hypothesis.given(numbers, numbers.filter(lambda x: abs(x) > 1e-3))
def test_a_metric_is_compared_with_the_reference_alone(value: float, reference: float) -> None:
    assert share(value, reference) == pytest.approx((value - reference) / abs(reference))


@hypothesis.given(st.floats(-1.0, 1.0))
def test_a_constant_that_a_script_subtracts_makes_of_a_like_loss_no_other(shift: float) -> None:
    losses = [4.0 * 0.8**step - shift for step in range(60)]
    # a ten-thousandth of what the loss has fallen by after its first quarter
    away = 1e-4 * (losses[15] - losses[-1])
    assert abs(share(losses[-1] + away, losses[-1], losses)) <= 1e-4 / LEAST * 1.01


def test_a_loss_that_ends_far_from_0_is_compared_with_its_end() -> None:
    losses = [1e9, math.inf, math.nan, *[1.0] * 40]
    assert share(1.5, 1.0, losses) == 0.5
    assert share(0.5, 1.0, [1.0, 2.0, 8.0, 16.0]) == -0.5


def test_nothing_is_a_share_of_0() -> None:
    assert share(0.0, 0.0) == 0.0
    assert share(-1.0, 0.0) == -math.inf
    assert share(1.0, 0.0, [0.0, 0.0, math.nan]) == math.inf
    assert share(1e-3, 0.0, [1.0]) == pytest.approx(1e-3 / LEAST)
