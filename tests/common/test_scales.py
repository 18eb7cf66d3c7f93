"""Scales are numbers, or tensors that a device moves."""

import pytest
import torch

from amp_patch.common.scales import is_one, kept


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, True), (1, True), (2.0, False), (torch.tensor(1.0), False)]
)
def test_a_devices_scale_is_never_taken_for_one(scale, expected: bool) -> None:
    assert is_one(scale) is expected


def test_a_kept_scale_does_not_move() -> None:
    moved = torch.tensor(8.0)
    before = kept(moved)
    moved.mul_(2.0)
    assert before.item() == 8.0
    assert kept(8.0) == 8.0
