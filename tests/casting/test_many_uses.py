"""A cast that is used very often in one iteration: what comes back to it is added up in float32."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from cast_counter import CastCounter
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch.casting.shared_casts import USES

HALF_OF = {"O1": torch.float16, "O4": torch.bfloat16}


class Unrolled(nn.Module):
    """Calls one cell and one layer at each step of time, with the same encoding."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 4)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        encoding, state = torch.tanh(self.encoder(x)).to(x.dtype), x.new_zeros(len(x), 16)
        outputs = []
        for _ in range(self.steps):
            state = self.cell(encoding, state)
            outputs.append(self.out(state))
        return torch.stack(outputs)


@pytest.mark.parametrize("level", HALF_OF)
def test_gradients_of_a_thousand_uses_are_float64_s(amp: ModuleType, level: str) -> None:
    torch.manual_seed(0)
    model, x = Unrolled(1000), torch.randn(4, 6)
    exact = copy.deepcopy(model).double()
    F.mse_loss(exact(x.double()), torch.ones(1000, 4, 4).double()).backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=32768.0, verbosity=0)
    with amp.scale_loss(F.mse_loss(model(x).float(), torch.ones(1000, 4, 4)), optimizer) as scaled:
        scaled.backward()
    eps = torch.finfo(HALF_OF[level]).eps
    for found, one in zip(model.parameters(), exact.parameters(), strict=True):
        error = (found.grad.double() - one.grad).norm() / one.grad.norm()
        assert error < 8 * eps


@pytest.mark.parametrize("level", HALF_OF)
def test_a_weight_is_cast_anew_when_its_cast_was_used_so_often(amp: ModuleType, level: str) -> None:
    model, half = nn.Linear(4, 4, bias=False), HALF_OF[level]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    x = torch.randn(2, 4, dtype=half)

    def step(uses: int) -> int:
        optimizer.zero_grad()
        with CastCounter([model.weight]) as counter:
            loss = sum(model(x).float().sum() for _ in range(uses))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return counter.of_weights

    step(1)
    assert not any(step(1) for _ in range(2 * USES[half]))  # refreshed with all others
    assert step(USES[half]) == 0
    assert step(2 * USES[half]) == 1
    assert step(3 * USES[half]) == 2
