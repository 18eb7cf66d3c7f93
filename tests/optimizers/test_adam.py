"""A group of Adam or AdamW: torch's bits, its state, and what the kernels are given."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from stepping import assert_torchs_steps, inputs_of
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from amp_patch.optimizers.adam import AdamUpdate, AdamWUpdate

TYPES = {Adam: AdamUpdate, AdamW: AdamWUpdate}


@given(
    kind=st.sampled_from([Adam, AdamW]),
    options=st.fixed_dictionaries(
        {
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "fused": st.booleans(),
        }
    ),
    seed=st.integers(0, 2**32),
)
def test_steps_have_the_bits_and_the_state_of_torchs(
    kind: type[Optimizer], options: dict[str, Any], seed: int
) -> None:
    assert_torchs_steps(kind, TYPES[kind](), options, seed)


def test_kernels_get_a_column_for_each_tensor_and_the_options_in_order() -> None:
    options = {"lr": 0.5, "betas": (0.25, 0.125), "eps": 2.0, "weight_decay": 0.75}
    optimizer = Adam([nn.Parameter(torch.ones(2))], **options, maximize=True)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(2)
    weight = torch.ones(2, dtype=torch.float16)
    rows = AdamUpdate().kernel_rows(inputs_of(optimizer), [weight])
    state = optimizer.state[param]
    expected = [param.grad, param, state["exp_avg"], state["exp_avg_sq"], None, weight]
    assert [id(column[0]) for column in rows.columns[:-1]] == [id(one) for one in expected]
    counter = rows.columns[-1][0]
    assert counter is state["step"]
    assert counter.dtype is torch.float32
    assert rows.arguments == [0.5, None, 0.25, 0.125, 2.0, 0.75, 0, 1]
    assert AdamWUpdate().arguments({**optimizer.defaults, "lr": param})[:2] == [0.0, param]
    decoupled = {key: one for key, one in optimizer.defaults.items() if "decoupled" not in key}
    assert [type_().arguments(decoupled)[6] for type_ in (AdamUpdate, AdamWUpdate)] == [0, 1]


def test_amsgrad_has_a_column_of_its_own() -> None:
    optimizer = Adam([nn.Parameter(torch.ones(2))], amsgrad=True)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(2)
    rows = AdamUpdate().kernel_rows(inputs_of(optimizer), [None])
    assert rows.columns[4][0] is optimizer.state[param]["max_exp_avg_sq"]
