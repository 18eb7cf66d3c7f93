"""Weights that another rank sends by ``torch.distributed.broadcast``; the other rank is played."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

SENT = 0.25


@pytest.fixture(autouse=True)
def _other_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a process group of one rank, which gets a number as torch's collectives write it."""
    original: Any = distributed.ProcessGroup.broadcast

    def broadcast(group: Any, tensors: list[Tensor], *args: Any) -> Any:
        for tensor in tensors:
            tensor.data.fill_(SENT)  # which moves no version
        return original(group, tensors, *args)

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed.ProcessGroup, "broadcast", broadcast)
    yield
    distributed.destroy_process_group()


def prepared(amp: ModuleType, level: str) -> tuple[nn.Module, Any]:
    """Return a model that has made a step, and its optimizer."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(torch.ones(4, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return model, optimizer


def of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return model.state_dict().values()


def of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return model.parameters()


CASES = [("O1", of_model), ("O2", of_groups), ("O2", of_state), ("O2", of_model), ("O3", of_state)]


@pytest.mark.parametrize(("level", "place"), CASES)
def test_what_was_sent_is_computed_with_and_saved(
    amp: ModuleType, level: str, place: Callable[..., Iterable[Tensor]]
) -> None:
    model, optimizer = prepared(amp, level)
    inputs = torch.ones(1, 3)
    model(inputs)  # casts of weights are held since
    for tensor in place(model, optimizer):
        distributed.broadcast(tensor, 0)
    assert torch.equal(model(inputs).float(), torch.full((1, 2), 4 * SENT))
    for value in model.state_dict().values():
        assert torch.equal(value, torch.full_like(value, SENT))


def test_statistics_may_be_shared_between_forward_and_backward(amp: ModuleType) -> None:
    model = amp.initialize(nn.BatchNorm1d(3), opt_level="O1", verbosity=0)
    loss = model(torch.randn(4, 3)).square().sum()
    distributed.all_reduce(model.running_mean)
    loss.backward()
    assert model.weight.grad is not None
