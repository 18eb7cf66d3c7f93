"""An optimizer's state at the dtypes of what it steps, and after loads."""

from types import ModuleType
from typing import Any

import pytest
import torch
from linear_training import LEVELS, linear, train_step
from torch.optim import Optimizer

F32 = torch.float32


class MixedState(Optimizer):
    """Keeps one tensor of state as its parameter is, and each other in a dtype of its own."""

    KEPT = (torch.float16, torch.bfloat16)

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            for dtype in self.KEPT if not state else ():
                state[str(dtype)] = torch.zeros_like(param, dtype=dtype)
            state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
            for dtype in self.KEPT:  # lerp_ refuses a mean in another dtype
                state[str(dtype)].lerp_(param.grad.to(dtype), 0.5)
            param.sub_(state["mean"], alpha=0.125)


def deactivated(
    amp: ModuleType, level: str, is_stepped_before: bool
) -> tuple[torch.nn.Module, MixedState]:
    """Return a model and its optimizer, which trained at a level that is over."""
    model = linear()
    optimizer = MixedState(model.parameters())
    if is_stepped_before:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train_step(amp, model, optimizer)
    amp.deactivate()
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_stepped_before", [False, True])
def test_state_in_a_dtype_of_the_optimizers_own_choice_keeps_it(
    amp: ModuleType, level: str, is_stepped_before: bool
) -> None:
    model, optimizer = deactivated(amp, level, is_stepped_before)
    state = optimizer.state[model.weight]
    assert state["mean"].dtype is F32
    if level != "O3":
        assert [state[str(dtype)].dtype for dtype in MixedState.KEPT] == [*MixedState.KEPT]
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("is_stepped_before", [False, True])
def test_at_o3_state_in_the_dtype_of_the_weights_goes_by_them(
    amp: ModuleType, is_stepped_before: bool
) -> None:
    model, optimizer = deactivated(amp, "O3", is_stepped_before)
    state = optimizer.state[model.weight]
    assert (state["mean"].dtype, state["torch.float16"].dtype) == (F32, F32)
    assert state["torch.bfloat16"].dtype is torch.bfloat16


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_that_a_script_reads_of_a_half_parameter_does_not_hinder_a_save(
    amp: ModuleType, level: str
) -> None:
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train_step(amp, model, optimizer)
    saved = optimizer.state_dict()
    assert not any(optimizer.state[param] for param in model.parameters())
    again = optimizer.state_dict()
    assert saved["state"].keys() == again["state"].keys()
    optimizer.state[model.weight]["step"] = torch.tensor(1.0)
    with pytest.raises(KeyError):
        optimizer.state_dict()
