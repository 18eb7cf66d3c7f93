"""A group of RMSprop: torch's bits, its state, and the options that the kernels are given."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from stepping import give_gradients, inputs_of, random_values, same_state
from torch import nn
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
    generator = torch.Generator().manual_seed(seed)
    values = random_values(generator)
    ours, theirs = (
        RMSprop([nn.Parameter(value.clone()) for value in values], lr=0.1, **options)
        for _ in range(2)
    )
    update = RMSpropUpdate()
    for _ in range(3):
        give_gradients([ours, theirs], generator)
        theirs.step()
        with torch.no_grad():
            update.step(inputs_of(ours))
        same_state(ours, theirs)


def test_kernels_get_the_options_in_order() -> None:
    options = {"lr": 0.5, "alpha": 0.25, "eps": 2.0, "weight_decay": 0.75, "momentum": 0.125}
    group = {**options, "centered": True, "maximize": False}
    assert RMSpropUpdate().arguments(group) == [0.5, None, 0.25, 2.0, 0.75, 0.125, 1, 0]
    lr = torch.tensor(0.5)
    assert RMSpropUpdate().arguments({**group, "lr": lr, "maximize": True})[:2] == [0.0, lr]
