"""Groups that count steps: what a state is made of, and when a step is not counted."""

from typing import Any

import pytest
import torch
from stepping import ADAGRAD_MAKES_STATES, inputs_of
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer, RMSprop

from amp_patch.optimizers.adagrad import AdagradUpdate
from amp_patch.optimizers.adam import AdamUpdate
from amp_patch.optimizers.counted_groups import CountedUpdate
from amp_patch.optimizers.rmsprop import RMSpropUpdate

UPDATES: dict[str, tuple[type[CountedUpdate], type[Optimizer], dict[str, Any]]] = {
    "adam": (AdamUpdate, Adam, {}),
    "adam, fused": (AdamUpdate, Adam, {"fused": True, "amsgrad": True}),
    "rmsprop": (RMSpropUpdate, RMSprop, {"momentum": 0.9}),
    "rmsprop, centered": (RMSpropUpdate, RMSprop, {"centered": True}),
}
if ADAGRAD_MAKES_STATES:
    UPDATES["adagrad"] = AdagradUpdate, Adagrad, {"initial_accumulator_value": 0.5}


def started(kind: Any, options: dict[str, Any], grad: Tensor) -> Optimizer:
    """Return an optimizer of one parameter with a gradient and without state."""
    param = nn.Parameter(torch.ones(2))
    optimizer: Optimizer = kind([param], lr=0.5, **options)
    optimizer.state.clear()  # that Adagrad makes at once
    param.grad = grad
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", UPDATES)
def test_state_is_made_as_torch_makes_it(name: str, dtype: torch.dtype) -> None:
    update, kind, options = UPDATES[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        ours, theirs = (started(kind, options, torch.zeros(2)) for _ in range(2))
        theirs.step()  # which adds nothing, for the gradients are 0
        update().make_states(inputs_of(ours))
    finally:
        torch.set_default_dtype(before)
    made, expected = (next(iter(one.state.values())) for one in (ours, theirs))
    assert list(made) == list(expected)
    assert made.pop("step").dtype == expected.pop("step").dtype
    for one, other in zip(made.values(), expected.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# torch's fused kernel does not look whether a gradient has the size of its parameter
@pytest.mark.parametrize("name", [one for one in UPDATES if "fused" not in one])
def test_a_step_that_fails_is_not_counted(name: str) -> None:
    kind, make, options = UPDATES[name]
    optimizer = started(make, options, torch.ones(2))
    update, inputs = kind(), inputs_of(optimizer)
    with torch.no_grad():
        update.step(inputs)
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        update.step(inputs._replace(grads=[torch.ones(3)]))
    assert inputs.states[0]["step"].item() == 1.0
    assert update.values() == [1.0]


@pytest.mark.parametrize("name", UPDATES)
def test_a_piece_takes_the_state_of_its_parameter_with_it(name: str) -> None:
    update, make, options = UPDATES[name]
    optimizer = started(make, options, torch.ones(2))
    assert update().cut_with(inputs_of(optimizer)) == []  # `step` makes it like the parameter
    optimizer.step()
    state = next(iter(optimizer.state.values()))
    cut = update().cut_with(inputs_of(optimizer))
    assert cut is not None
    assert sorted(map(id, cut)) == sorted(id(one) for key, one in state.items() if key != "step")


@pytest.mark.parametrize("name", UPDATES)
def test_kernels_get_a_column_for_each_tensor(name: str) -> None:
    update, make, options = UPDATES[name]
    optimizer = started(make, options, torch.ones(2))
    optimizer.step()
    ((param, state),) = optimizer.state.items()
    weight = torch.ones(2, dtype=torch.float16)
    rows = update().kernel_rows(inputs_of(optimizer), [weight])
    columns = [column[0] for column in rows.columns]
    expected = [param.grad, param, *(state.get(one) for one in update.tensors), weight]
    assert list(map(id, columns[:-1])) == list(map(id, expected))
    assert columns[-1] is state["step"]
    assert columns[-1].dtype is torch.float32
