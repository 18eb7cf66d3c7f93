"""The half weights follow the masters in each step: for its hooks, and after errors."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from linear_training import linear, prepared, train_step
from torch.optim import SGD

from amp_patch.weights.master_weights import MasterWeights


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_see_the_weights_just_stepped(amp: ModuleType, level: str, when: str) -> None:
    model = linear()
    optimizer, seen = SGD(model.parameters(), lr=0.125), []

    def note(*_: Any) -> None:
        seen.append((model.weight.detach().clone(), model.state_dict()["weight"].clone()))

    if when == "before":
        optimizer.register_step_post_hook(note)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    if when == "after":
        optimizer.register_step_post_hook(note)
    for seed in range(2):
        train_step(amp, model, optimizer, seed=seed)
        half, exact = seen[-1]
        assert torch.equal(half, model.weight)
        assert torch.equal(exact, model.state_dict()["weight"])
    assert not torch.equal(seen[0][0], seen[1][0])


def test_a_step_hook_may_write_to_half_weights(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    optimizer.register_step_post_hook(lambda *_: model.weight.data.clamp_(-0.125, 0.125))
    for seed in range(3):
        train_step(amp, model, optimizer, seed=seed)
        assert model.weight.abs().max().item() <= 0.125
        assert model.state_dict()["weight"].abs().max().item() <= 0.125


def test_an_error_in_the_step_leaves_the_model_equal_to_its_masters(amp: ModuleType) -> None:
    class Failing(SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            self.param_groups[0]["params"][0].fill_(0.75)
            raise ArithmeticError("step")

    model, optimizer = prepared(amp, make=lambda params: Failing(params, lr=0.125))
    with pytest.raises(ArithmeticError, match="step"):
        optimizer.step()
    assert torch.equal(model.weight, torch.full((3, 4), 0.75, dtype=torch.float16))


def test_what_could_not_be_rounded_is_rounded_before_the_next_use(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(amp)
    train_step(amp, model, optimizer)
    before = model.weight.clone()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patches:
        patches.setattr(MasterWeights, "publish", fail)
        with pytest.raises(MemoryError):
            train_step(amp, model, optimizer, seed=1)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, next(amp.master_params(optimizer)).half())
