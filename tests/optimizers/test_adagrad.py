"""A group of Adagrad: torch's bits, its state, and the options that the kernels are given."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepping import (
    ADAGRAD_MAKES_STATES,
    assert_torchs_steps,
    inputs_of,
    same_state,
)
from torch import nn
from torch.optim import Adagrad

from amp_patch.optimizers.adagrad import AdagradUpdate


@given(
    options=st.fixed_dictionaries(
        {
            "lr_decay": st.sampled_from([0.0, 0.3]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "initial_accumulator_value": st.sampled_from([0.0, 0.1]),
            "maximize": st.booleans(),
            "foreach": st.booleans(),
        }
    ),
    seed=st.integers(0, 2**32),
)
def test_steps_have_the_bits_and_the_state_of_torchs(options: dict[str, Any], seed: int) -> None:
    assert_torchs_steps(Adagrad, AdagradUpdate(), options, seed)


@pytest.mark.skipif(not ADAGRAD_MAKES_STATES, reason="torch 2.6 makes no state later")
def test_sums_of_a_later_group_start_as_torch_starts_them() -> None:
    ours, theirs = (
        Adagrad([nn.Parameter(torch.ones(2))], lr=0.1, initial_accumulator_value=0.5)
        for _ in range(2)
    )
    late = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for optimizer, param in zip((ours, theirs), late, strict=True):
        # torch takes the optimizer's value, not the group's
        optimizer.add_param_group({"params": [param], "initial_accumulator_value": 8.0})
        optimizer.param_groups.pop(0)
        param.grad = torch.ones(3)
    theirs.step()
    options = AdagradUpdate.options(ours, ours.param_groups[0])
    with torch.no_grad():
        AdagradUpdate().step(inputs_of(ours)._replace(options=options))
    same_state(ours, theirs)


def test_torchs_fused_step_is_left_to_torch() -> None:
    optimizer = Adagrad([nn.Parameter(torch.ones(2))], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    assert not AdagradUpdate().suits_reference(inputs_of(optimizer))


def test_kernels_get_the_options_in_order() -> None:
    group = {"lr": 0.5, "lr_decay": 0.25, "weight_decay": 0.75, "eps": 2.0, "maximize": True}
    assert AdagradUpdate().arguments(group) == [0.5, None, 0.25, 0.75, 2.0, 1]
    lr = torch.tensor(0.5)
    assert AdagradUpdate().arguments({**group, "lr": lr, "maximize": False})[:2] == [0.0, lr]
