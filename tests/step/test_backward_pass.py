"""The hooks of a step, called by others than `scale_loss`: the same in each allowed order."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_patch.session import session

#: Scales at which these losses do not overflow by themselves.
SMALL: dict[str, Any] = {"max_loss_scale": 64.0}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
Step = Callable[[ModuleType, Tensor, Any], None]


def by_scale_loss(amp: ModuleType, loss: Tensor, optimizer: Any) -> None:
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def by_hooks(amp: ModuleType, loss: Tensor, optimizer: Any) -> None:
    one = begun(loss, optimizer)
    one.unscale_()
    one.update()
    optimizer.step()


def update_last(amp: ModuleType, loss: Tensor, optimizer: Any) -> None:
    """As torch.amp.GradScaler's users write it."""
    one = begun(loss, optimizer)
    one.unscale_()
    optimizer.step()
    one.update()


def begun(loss: Tensor, optimizer: Any) -> Any:
    one = session.passes.of_loss([session.optimizers.steps[optimizer]], 0, loss.device)
    one.scale(loss).backward()
    return one


def train(amp: ModuleType, level: str, step: Step, factors: list[float]) -> list[Any]:
    """Return what a training leaves whose losses are multiplied by these factors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **SMALL)
    skipped = []
    for factor in factors:
        optimizer.zero_grad()
        step(amp, model(torch.ones(2, 3)).float().sum() * factor, optimizer)
        skipped.append(amp.step_was_skipped(optimizer))
    values = [param.detach().clone() for param in amp.master_params(optimizer)]
    result = [skipped, amp.state_dict(), values]
    amp.deactivate()
    return result


@pytest.mark.parametrize("step", [by_hooks, update_last], ids=lambda step: step.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_the_hooks_do_what_scale_loss_does(amp: ModuleType, level: str, step: Step) -> None:
    # every row of three passes, each finite or not, comes in it
    kinds = [0.5, torch.inf] if level in ("O1", "O2") else [0.5, -1.0]
    factors = [kinds[int(digit)] for digit in "0001011100"]
    expected = train(amp, level, by_scale_loss, factors)
    torch.testing.assert_close(train(amp, level, step, factors), expected, rtol=0, atol=0)
    assert expected[0] == [factor == torch.inf for factor in factors]


def test_a_pass_that_is_given_up_leaves_earlier_gradients_and_the_scale(amp: ModuleType) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **SMALL)
    with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = [param.grad.clone() for param in model.parameters()]
    state = amp.state_dict()
    for count in range(2):  # to give up again changes nothing
        one = begun(model(torch.ones(2, 3)).sum() * torch.inf, optimizer)
        for _ in range(count + 1):
            one.abandon()
    torch.testing.assert_close([param.grad for param in model.parameters()], before)
    assert amp.state_dict() == state
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_an_overflow_of_a_pass_that_is_given_up_skips_no_step(amp: ModuleType) -> None:
    """An error comes between ``unscale_`` and ``update``: no step waits for the check any more."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **SMALL)
    one = begun(model(torch.ones(2, 3)).sum() * torch.inf, optimizer)
    one.unscale_()
    one.abandon()
    optimizer.zero_grad()
    by_scale_loss(amp, model(torch.ones(2, 3)).sum(), optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 64.0, "unskipped": 1}


def test_a_pass_in_another_of_the_same_optimizer_is_refused(amp: ModuleType) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **SMALL)
    outer = begun(model(torch.ones(2, 3)).sum(), optimizer)
    with pytest.raises(RuntimeError, match="blocks of one optimizer must follow each other"):
        begun(model(torch.ones(2, 3)).sum(), optimizer)
    outer.unscale_()
    outer.update()
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
