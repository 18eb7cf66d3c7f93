"""``torch.distributed.checkpoint`` reads masters, also where threads save at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict


def moments(state: Mapping[str, Any]) -> list[Tensor]:
    return [one["exp_avg"] for one in state["state"].values()]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set while a thread is in what torch does to read a state, which takes it a while."""
    event = threading.Event()
    original = state_dict._get_optim_state_dict

    def slow(*args: Any, **kwargs: Any) -> Any:
        event.set()
        time.sleep(0.1)
        return original(*args, **kwargs)

    monkeypatch.setattr(state_dict, "_get_optim_state_dict", slow)
    return event


def test_a_thread_that_saves_while_another_does_saves_the_masters_state_too(
    amp: ModuleType, inside: threading.Event
) -> None:
    trained = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        with amp.scale_loss(model(torch.randn(4, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        trained.append((model, optimizer))
    saved: dict[int, list[Tensor]] = {}

    def save(number: int) -> None:
        saved[number] = moments(state_dict.get_optimizer_state_dict(*trained[number]))

    first = threading.Thread(target=save, args=(0,))
    first.start()
    assert inside.wait(timeout=20)
    save(1)
    first.join()
    for number, (_, optimizer) in enumerate(trained):
        expected = [state["exp_avg"] for state in optimizer.state.values()]
        assert len(saved[number]) == len(expected) == 2
        assert all(map(torch.equal, saved[number], expected))
