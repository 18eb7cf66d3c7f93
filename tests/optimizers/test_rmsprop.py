"""A group of RMSprop: torch's bits, its state, and the options that the kernels are given."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from stepping import assert_torchs_steps
from torch.optim import RMSprop

from amp_patch.optimizers.rmsprop import RMSpropUpdate


@given(
    options=st.fixed_dictionaries(
        {
            "alpha": st.sampled_from([0.99, 0.5]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "centered": st.booleans(),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "maximize": st.booleans(),
            "foreach": st.booleans(),
        }
    ),
    seed=st.integers(0, 2**32),
)
def test_steps_have_the_bits_and_the_state_of_torchs(options: dict[str, Any], seed: int) -> None:
    assert_torchs_steps(RMSprop, RMSpropUpdate(), options, seed)


def test_kernels_get_the_options_in_order() -> None:
    options = {"lr": 0.5, "alpha": 0.25, "eps": 2.0, "weight_decay": 0.75, "momentum": 0.125}
    group = {**options, "centered": True, "maximize": False}
    assert RMSpropUpdate().arguments(group) == [0.5, None, 0.25, 2.0, 0.75, 0.125, 1, 0]
    lr = torch.tensor(0.5)
    assert RMSpropUpdate().arguments({**group, "lr": lr, "maximize": True})[:2] == [0.0, lr]
