"""The functions of ``torch.distributed.checkpoint.state_dict`` know masters, however imported."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as functions
from torch.optim import AdamW

NAMES = ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict")
NAMES += ("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict")


def prepared(amp: ModuleType, level: str) -> tuple[nn.Module, AdamW]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = AdamW(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    scaled_backward(amp, model(torch.randn(3, 4)).float().square().mean(), optimizer)
    optimizer.step()
    return model, optimizer


def masters_of(amp: ModuleType, optimizer: AdamW) -> list[Tensor]:
    return [master.detach().clone() for master in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("in_local_variables", [True, False])
def test_a_state_is_that_of_the_masters(
    amp: ModuleType, level: str, in_local_variables: bool
) -> None:
    # a local variable is where nobody finds a function to replace
    local: dict[str, Any] = {name: getattr(functions, name) for name in NAMES}
    model, optimizer = prepared(amp, level)
    if not in_local_variables:
        local = {name: getattr(functions, name) for name in NAMES}
    weights, state = local["get_state_dict"](model, optimizer)
    masters = masters_of(amp, optimizer)
    for found in (weights, local["get_model_state_dict"](model)):
        assert all(map(torch.equal, found.values(), masters))
    saved = {name: value.clone() for name, value in weights.items()}
    for key in ("state", "param_groups"):
        assert state[key]
        assert local["get_optimizer_state_dict"](model, optimizer)[key]

    new = {name: torch.randn_like(value) for name, value in saved.items()}
    local["set_model_state_dict"](model, dict(new))
    assert all(map(torch.equal, masters_of(amp, optimizer), new.values()))
    rounded = [value.to(model[0].weight.dtype) for value in new.values()]
    assert all(map(torch.equal, model.parameters(), rounded))

    local["set_state_dict"](
        model, optimizer, model_state_dict=dict(saved), optim_state_dict=dict(state)
    )
    assert all(map(torch.equal, masters_of(amp, optimizer), saved.values()))
