"""A group of SGD: torch's bits, its momentum, and what the kernels are given."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stepping import give_gradients, inputs_of, random_values, same_state
from torch import nn
from torch.optim import SGD

from amp_patch.optimizers.sgd import SgdUpdate


@given(
    options=st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.9]),
            "dampening": st.sampled_from([0.0, 0.25]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "nesterov": st.booleans(),
            "maximize": st.booleans(),
            "fused": st.booleans(),
        }
    ).filter(lambda o: not o["nesterov"] or (o["momentum"] > 0 and o["dampening"] == 0)),
    seed=st.integers(0, 2**32),
)
def test_steps_have_the_bits_and_the_momentum_of_torchs(options: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = random_values(generator)
    ours, theirs = (
        SGD([nn.Parameter(value.clone()) for value in values], lr=0.1, **options) for _ in range(2)
    )
    update = SgdUpdate()
    for _ in range(3):
        give_gradients([ours, theirs], generator)
        theirs.step()
        with torch.no_grad():
            update.step(inputs_of(ours))
        if options["momentum"]:
            same_state(ours, theirs)
        for one, other in zip(*(o.param_groups[0]["params"] for o in (ours, theirs)), strict=True):
            assert torch.equal(one, other)


def stepped(**options: Any) -> tuple[SGD, list[nn.Parameter]]:
    """Return an optimizer of two parameters with gradients; one step of it was made."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = SGD(params, lr=0.5, **options)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    return optimizer, params


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_only_momentum_is_state(momentum: float) -> None:
    assert SgdUpdate().has_state({"momentum": momentum}) == bool(momentum)


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_fused_kernel_takes_no_momentum_that_only_some_have(fused: bool) -> None:
    optimizer, params = stepped(momentum=0.5, fused=fused)
    assert SgdUpdate().suits_reference(inputs_of(optimizer))
    del optimizer.state[params[0]]["momentum_buffer"]
    assert SgdUpdate().suits_reference(inputs_of(optimizer)) == (not fused)


def test_kernels_get_new_momentum_with_a_counter_of_zero() -> None:
    optimizer, params = stepped(momentum=0.5, dampening=0.25, weight_decay=0.125)
    first, second = params
    held = optimizer.state[first]["momentum_buffer"]
    optimizer.state[second].clear()
    weights = [None, torch.ones(2, dtype=torch.float16)]
    rows = SgdUpdate().kernel_rows(inputs_of(optimizer), weights)
    grads, stepped_params, buffers, halves, counters = rows.columns
    assert [id(one) for one in grads] == [id(param.grad) for param in params]
    assert stepped_params is params or [*map(id, stepped_params)] == [*map(id, params)]
    assert buffers[0] is held
    assert (halves, counters[0]) == (weights, None)
    assert (counters[1].item(), counters[1].dtype) == (0.0, torch.float32)
    assert rows.arguments == [0.5, None, 0.5, 0.25, 0.125, 0, 0, 0]
    # entered by who knows that kernels step
    assert optimizer.state[second] == {}
    ((state, name, value),) = rows.new_state
    assert state is optimizer.state[second]
    assert (name, id(value)) == ("momentum_buffer", id(buffers[1]))


def test_without_momentum_kernels_get_none() -> None:
    optimizer, _ = stepped(nesterov=False, maximize=True)
    rows = SgdUpdate().kernel_rows(inputs_of(optimizer), [None, None])
    assert rows.columns[2] == rows.columns[4] == [None, None]
    assert rows.new_state == []
    assert rows.arguments == [0.5, None, 0.0, 0.0, 0.0, 0, 0, 1]
