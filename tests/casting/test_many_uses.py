"""A cast that is used very often in one iteration: what comes back to it is added up in float32."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_programs import (
    Net,
    Program,
    Run,
    TwiceNet,
    TwiceRun,
    bits,
    maker,
    programs,
    run_both,
    shared_fixtures,
    steps_without_gradients,
)
from cast_counter import CastCounter
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch.casting.shared_casts import USES
from amp_patch.casting.weight_cache import WeightCache

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


@pytest.mark.parametrize("half", HALF_OF.values())
@pytest.mark.parametrize("width", [4, 256])  # small, and with memory that goes in the backward
def test_casts_of_one_iteration_have_one_memory(
    cache: WeightCache, half: torch.dtype, width: int
) -> None:
    model = nn.Linear(width, width)
    cache.add_model(model)
    x = torch.randn(2, width, dtype=half)

    def gradient(uses: int) -> Tensor:
        model.weight.grad = None
        casts = [cache.cast(model.weight, half) for _ in range(uses)]
        assert len(set(map(id, casts))) == -(-uses // (USES[half] + 1))
        assert len({cast.data_ptr() for cast in casts}) == 1
        assert torch.equal(casts[-1], model.weight.to(half))
        loss = sum((x @ cast).float().sum() for cast in casts)
        del casts
        loss.backward()
        assert model.weight.grad is not None
        return model.weight.grad

    for _ in range(3):
        one = gradient(1)
        torch.testing.assert_close(gradient(200), 200 * one, rtol=0.06, atol=0.06)
        with torch.no_grad():
            model.weight += 1.0
        cache.mark_stale()


@steps_without_gradients
@pytest.mark.parametrize(("run", "net"), [(Run, Net), (TwiceRun, TwiceNet)])
@shared_fixtures
@given(program=programs())
def test_a_cast_for_each_use_gives_every_bit_that_no_cache_gives(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, run: Any, net: Any, program: Program
) -> None:
    for half in HALF_OF.values():
        monkeypatch.setitem(USES, half, 0)
    for what, found, expected in run_both(maker(run, net, "O4"), program, monkeypatch):
        assert torch.equal(bits(found), bits(expected)), what
