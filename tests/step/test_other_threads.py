"""Another thread that trains a model of its own changes nothing of what this one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from amp_patch import amp as core
from amp_patch.gradients.gradients import Gradients
from amp_patch.session import session


def in_thread(act: Callable[[], object]) -> None:
    """Run it in a thread of its own, to its end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


class Beside:
    """A plain training, each step of which is made in a thread of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        def act() -> None:
            self._optimizer.zero_grad()
            self.model(torch.ones(2, 4)).square().sum().backward()
            self._optimizer.step()

        in_thread(act)


def train(amp: ModuleType, level: str, fused: bool, beside: Callable[[], object]) -> list[Tensor]:
    """Accumulate two blocks for each step, with what a script may do between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"loss_scale": 64.0, "fused_step": fused, "verbosity": 0}
    amp.initialize(model, optimizer, opt_level=level, **options)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(2):
            loss = model(torch.randn(4, 8)).float().square().mean()
            beside()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
                beside()
            beside()
        for master in list(amp.master_params(optimizer))[:2]:
            master.grad.mul_(0.5)
        beside()
        with torch.no_grad():
            model[2].weight.grad.mul_(0.5)  # without effect at O2 and O5
        beside()
        if step == 2:
            amp.clip_grad_norm_(optimizer, 0.1)
            beside()
        optimizer.step()
        beside()
    numbers = [value.clone() for value in model.state_dict().values()]
    amp.deactivate()
    return numbers


@pytest.mark.filterwarnings("ignore:What is written to the gradients of half")
@pytest.mark.parametrize(
    ("level", "fused"),
    [("O1", False), ("O2", False), ("O2", True), ("O4", False), ("O5", False), ("O5", True)],
)
def test_it_trains_as_without_the_other(amp: ModuleType, level: str, fused: bool) -> None:
    alone = train(amp, level, fused, lambda: None)
    assert all(map(torch.equal, train(amp, level, fused, Beside().step), alone))


def test_nobody_reads_the_gradients_that_another_thread_writes(amp: ModuleType) -> None:
    """While torch writes one, without Python's lock, a look at it may end the process."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    other, own = Beside(), nn.Linear(4, 4)
    own_optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        own(torch.ones(2, 4)).mean().backward()
        own_optimizer.step()
    watched = set(map(id, session.guard.unprepared.watch_foreign(8.0).params))
    assert watched == set(map(id, own.parameters()))


def test_nobody_touches_gradients_that_another_thread_has_in_hand(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    calls: list[int] = []
    monkeypatch.setattr(Gradients, "give_back", lambda *_: calls.append(1))
    with amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    in_thread(lambda: nn.Linear(4, 4)(torch.ones(2, 4)).mean().backward())
    assert calls == []
    nn.Linear(4, 4)(torch.ones(2, 4)).mean().backward()
    assert calls == [1]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().sum().backward()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_training_of_two_threads_is_one(amp: ModuleType, level: str) -> None:
    """One computes plain backwards, the other clears, clips by hand and steps."""
    trained = []
    for run in (lambda act: act(), in_thread):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            run(partial(backward, model))
            for master in optimizer.param_groups[0]["params"]:
                master.grad.clamp_(-0.5, 0.5)
            optimizer.step()
        trained.append([value.clone() for value in model.state_dict().values()])
        core.deactivate()
    assert all(map(torch.equal, *trained))
