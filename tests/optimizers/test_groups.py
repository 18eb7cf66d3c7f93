"""What a type of optimizer says of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_patch.optimizers.groups import GroupUpdate, values_of


class Numbers(GroupUpdate):
    """An update with an option that must be numbers."""

    numbers = ("betas",)


@pytest.mark.parametrize(
    ("options", "suits"),
    [
        ({"betas": (0.9, 0.99)}, True),
        ({"betas": 0.9}, True),
        ({}, True),
        ({"betas": (0.9, torch.tensor(0.99))}, False),
        ({"betas": 0.9, "differentiable": True}, False),
    ],
)
def test_kernels_take_numbers(options: dict[str, Any], suits: bool) -> None:
    assert Numbers.suits_kernels(options) is suits


def test_the_values_of_an_option_are_those_of_a_list_or_itself() -> None:
    assert [*map(values_of, ([1, 2], (3,), 4))] == [[1, 2], (3,), [4]]
