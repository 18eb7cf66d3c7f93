"""What is sent along with half weights, as a rank that gets it sees it; the ranks themselves are in
``tests/distributed/test_wrapping.py``."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Tensor]]]:
    """Give a process group of one rank, and what is sent: the other rank has 0.1 everywhere."""
    found: list[list[Tensor]] = []

    def send(group: Any, tensors: list[Tensor], bucket_size: int, source: int) -> None:
        found.append(tensors)
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(0.1)

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    monkeypatch.setattr(torch.distributed, "_broadcast_coalesced", send)
    yield found
    torch.distributed.destroy_process_group()


def prepared(amp: ModuleType, level: str) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_and_values_are_those_of_the_sender(
    amp: ModuleType, sent: list[list[Tensor]], level: str
) -> None:
    model, optimizer = prepared(amp, level)
    DistributedDataParallel(model)
    sent_value = torch.tensor(0.1)
    for value in [*model[0].state_dict().values(), *amp.master_params(optimizer)]:
        assert torch.equal(value.detach(), sent_value.expand_as(value))
    for param in model.parameters():
        assert torch.equal(param.detach(), sent_value.to(param.dtype).expand_as(param))


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_nothing_else_is_sent_where_there_are_no_masters(
    amp: ModuleType, sent: list[list[Tensor]], level: str
) -> None:
    model, _ = prepared(amp, level)
    DistributedDataParallel(model)
    amp.deactivate()
    assert {tensor.dtype for tensors in sent for tensor in tensors} - {torch.int64} == {
        torch.float16 if level == "O3" else torch.float32
    }


def test_deactivate_sends_as_torch_does(amp: ModuleType, sent: list[list[Tensor]]) -> None:
    model, _ = prepared(amp, "O2")
    amp.deactivate()
    DistributedDataParallel(model)
    assert [len(tensors) for tensors in sent] == [len(model.state_dict())]
