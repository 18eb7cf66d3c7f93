"""Norms over ranks of which one has no gradients, played by one process, and over two ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import rank_training as training
import ranks
import torch
from support import nightly_but
from torch import distributed

from amp_patch.distributed.norms import clip_by_norm
from amp_patch.distributed.process_groups import StepRanks


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
    clip_by_norm([], 1.0, 2.0, StepRanks(), stages=group)
    clip_by_norm([torch.ones(1)], 1.0, 2.0, StepRanks(), stages=group, device=devices[1])
    assert sent[2:] == [devices[0]] * 2


def test_a_rank_that_is_alone_may_have_no_gradients() -> None:
    """As of a ZeroRedundancyOptimizer in one process: it has parts, and no group shares them."""
    assert clip_by_norm([], 1.0, 2.0, StepRanks([], have_parts=True)) == 0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_parts_have_the_norm_of_the_whole(
    norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is played: it holds the same numbers."""

    def all_reduce(tensor: torch.Tensor, operation: Any, _: Any) -> None:
        if operation == distributed.ReduceOp.SUM:
            tensor.mul_(2)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    parts = [torch.tensor([3.0, -4.0]), torch.tensor([1.0, 2.0])]
    whole = torch.cat([*parts, *parts])
    group: Any = SimpleNamespace(group_name="all")
    norm = clip_by_norm(parts, 1.0, norm_type, StepRanks([group], have_parts=True))
    torch.testing.assert_close(norm, torch.linalg.vector_norm(whole, norm_type))
    torch.testing.assert_close(torch.cat([*parts, *parts]), whole / (norm + 1e-6))


@pytest.mark.parametrize("are_parts", [True, False])
def test_what_does_not_accept_the_norm_has_nothing_clipped(
    are_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(total: torch.Tensor) -> None:
        raise ArithmeticError(total.item())

    monkeypatch.setattr(distributed, "all_reduce", lambda *_: None)
    group: Any = SimpleNamespace(group_name="all")
    ranks_of = StepRanks([group], have_parts=True) if are_parts else StepRanks()
    part = torch.tensor([3.0, -4.0])
    with pytest.raises(ArithmeticError, match=r"^5\.0$"):
        clip_by_norm([part], 1.0, 2.0, ranks_of, accept=accept)
    assert part.tolist() == [3.0, -4.0]


@pytest.mark.parametrize("level", nightly_but(["O2"], ["O0", "O1", "O2", "O5"]))
def test_torch_clips_what_is_split_beside_what_is_whole(level: str) -> None:
    for before, after, expected in ranks.run(training.clipped_by_torch, "tensor", level):
        assert before == pytest.approx(expected, rel=2e-2)
        assert after == pytest.approx(0.5, rel=1e-2)
