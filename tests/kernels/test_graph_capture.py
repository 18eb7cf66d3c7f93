"""What a captured graph leaves to the host is done at once, after each replay, or refused."""

from __future__ import annotations

import pytest
import torch

from amp_patch.kernels.graph_capture import Captures

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_without_a_capture_it_is_done_at_once() -> None:
    captures, done = Captures(), []
    assert captures.can_follow(CPU)
    captures.follow(CPU, lambda: done.append(1))
    assert done == [1]
    assert captures.wait_for(torch.ones(1))
    assert not captures.wait_for(torch.zeros(1))


@pytest.mark.usefixtures("capturing")
def test_in_a_collected_capture_it_waits_for_the_replays() -> None:
    captures, done = Captures(), []
    with captures.collect() as actions:
        assert captures.can_follow(CUDA)
        captures.follow(CUDA, lambda: done.append("cuda"))
        captures.follow(CPU, lambda: done.append("cpu"))  # nothing of the CPU is captured
        assert done == ["cpu"]
    for action in [*actions, *actions]:
        action()
    assert done == ["cpu", "cuda", "cuda"]


@pytest.mark.usefixtures("capturing")
def test_a_capture_that_nobody_collects_is_refused_also_after_one_that_failed() -> None:
    captures = Captures()
    with pytest.raises(ZeroDivisionError), captures.collect():
        raise ZeroDivisionError
    assert not captures.can_follow(CUDA)
    with pytest.raises(RuntimeError, match=r"call amp_patch.cuda_graph.capture\(step_function\)"):
        captures.follow(CUDA, lambda: None)


@pytest.mark.usefixtures("capturing")
def test_the_host_waits_for_no_device_that_is_captured() -> None:
    captures = Captures()
    captures.refuse_waiting(CPU)
    with pytest.raises(RuntimeError, match="must be one that its device can skip"):
        captures.refuse_waiting(CUDA)
