"""What a captured graph leaves to the host is done at once, after each replay, or refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from amp_patch.kernels.graph_capture import Captures, in_living_graphs

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
    with captures.collect() as host_side:
        assert captures.can_follow(CUDA)
        captures.follow(CUDA, lambda: done.append("cuda"))
        captures.follow(CPU, lambda: done.append("cpu"))  # nothing of the CPU is captured
        assert done == ["cpu"]
    for action in [*host_side.actions, *host_side.actions]:
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


def test_only_a_cuda_device_captures() -> None:
    assert not Captures().are_made(CPU)


def test_a_step_that_fails_prepares_for_no_capture() -> None:
    captures, reserved = Captures(), []
    with captures.rehearse():
        captures.note_use(reserved.append)
        captures.note_use(reserved.append)
    assert reserved == [2]

    def fails() -> None:
        with captures.rehearse():
            captures.note_use(reserved.append)
            raise ZeroDivisionError

    pytest.raises(ZeroDivisionError, fails)
    with captures.rehearse():
        pass
    assert reserved == [2]
    assert not captures.are_rehearsed


# --- memory that a graph copies from ---


def is_alive(reference: weakref.ref[torch.Tensor]) -> bool:
    gc.collect()
    return reference() is not None


def test_memory_lives_as_long_as_the_graph_that_copies_from_it() -> None:
    captures, memory = Captures(), torch.zeros(3)
    reference = weakref.ref(memory)
    with captures.collect() as first:
        captures.keep(memory)
        captures.keep(memory)
    with captures.collect() as second:
        captures.keep(memory)
    del memory
    captures.release(first)
    assert is_alive(reference)
    captures.release(second)
    assert not is_alive(reference)


def test_what_another_graph_copies_from_lives_on_and_is_held_once() -> None:
    captures, memory = Captures(), torch.zeros(3)
    for _ in range(5):
        captures.keep(memory)
    assert len(captures._memory_of_others) == 1
    reference = weakref.ref(memory)
    del memory
    assert is_alive(reference)


def test_memory_is_given_up_when_the_replays_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, memory = Captures(), torch.zeros(3)
    reference, waited = weakref.ref(memory), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device = torch.device("cuda", 1)  # which need not be the current one any more
    wait = lambda device: waited.append((device, is_alive(reference)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    with captures.collect(device) as host_side:
        captures.keep(memory)
    del memory
    captures.release(host_side)
    assert waited == [(device, True)]
    assert not is_alive(reference)


def test_during_another_capture_nobody_can_wait_so_that_memory_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, memory = Captures(), torch.zeros(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: pytest.fail("a capture forbids it")
    )
    with captures.collect() as host_side:
        captures.keep(memory)
    reference = weakref.ref(memory)
    del memory
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captures.release(host_side)
    assert is_alive(reference)


# --- autograd graphs that lead to parameters ---


def test_a_parameter_is_in_a_graph_as_long_as_somebody_holds_that() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    params = list(model.parameters())
    assert in_living_graphs(params) == []
    loss = model[0](torch.ones(2)).sum()
    assert [id(one) for one in in_living_graphs(params)] == [id(params[0])]
    loss.backward()
    assert len(in_living_graphs(params)) == 1  # also when its buffers are freed
    loss = loss.detach()
    assert in_living_graphs(params) == []


def test_hooks_and_gradients_make_no_graph() -> None:
    param = nn.Parameter(torch.ones(2))
    param.register_hook(lambda grad: grad)
    param.register_post_accumulate_grad_hook(lambda param: None)
    (param * 2).sum().backward()
    assert in_living_graphs([param]) == []
