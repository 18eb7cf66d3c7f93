"""Norms over ranks of which one has no gradients; the other ranks are played."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from amp_patch.distributed.groups import StepRanks
from amp_patch.distributed.norms import clip_by_norm


def test_a_rank_without_gradients_sends_by_the_backend_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group of two backends chooses by the device of what is sent."""
    sent: list[torch.device] = []

    def all_reduce(tensor: torch.Tensor, *_: Any) -> None:
        sent.append(tensor.device)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    devices = [torch.device("cpu"), torch.device("meta")]
    group: Any = SimpleNamespace(group_name="all", _device_types=devices)
    for device in devices:
        clip_by_norm([], 1.0, 2.0, StepRanks([group], have_parts=True), device=device)
    assert sent == devices
