"""``model.zero_grad()`` clears as torch's does, by one walk through the modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])


class Counting(nn.Module):
    """A model that counts who walks through its parameters; one of them it does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unnamed = nn.Linear(3, 2), nn.Linear(2, 2)
        self.walks = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.walks += 1
        every = super().named_parameters(*args, **kwargs)
        return ((name, one) for name, one in every if name != "unnamed.bias")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.unnamed(self.layer(inputs))


def trained(amp: ModuleType, level: str) -> Counting:
    model = Counting()
    every = [*model.layer.parameters(), *model.unnamed.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 3)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    model.walks = 0
    return model


@LEVELS
@pytest.mark.parametrize("args", [(), (True,)])
def test_all_that_the_model_names_is_cleared_by_one_walk(
    amp: ModuleType, level: str, args: tuple[bool, ...]
) -> None:
    model = trained(amp, level)
    model.zero_grad(*args)
    assert model.walks == 1
    assert [one.grad for one in (*model.layer.parameters(), model.unnamed.weight)] == [None] * 3
    assert model.unnamed.bias.grad is not None


@LEVELS
def test_zeros_stay_where_they_are_asked_for(amp: ModuleType, level: str) -> None:
    model = trained(amp, level)
    before = model.layer.weight.grad
    model.zero_grad(set_to_none=False)
    assert model.layer.weight.grad is before
    assert not before.any()


def test_a_replica_is_warned_of_as_by_torch(amp: ModuleType) -> None:
    model = trained(amp, "O2")
    model._is_replica = True
    with pytest.warns(UserWarning, match=r"nn.DataParallel\(\) has no effect"):
        model.zero_grad()
