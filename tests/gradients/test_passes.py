"""What backwards wrote is taken in pass after pass, in memory and tables that are made once."""

import weakref
from types import ModuleType

import pytest
import torch
from drawn_passes import Pass, Received
from torch import nn
from torch.optim import SGD

from amp_patch.gradients import passes
from amp_patch.gradients.gradient_buffers import GradientBuffers
from amp_patch.gradients.param_pairs import ParamPairs


def test_a_pass_that_failed_before_its_end_is_not_ended_by_a_later_one() -> None:
    received = Received(is_lazy=False, in_place=0)
    received.backward(Pass((1, 2, 3), 8.0, ""))
    received.gradients.passes.receive(received.pairs, 8.0)
    received.gradients.drop(received.pairs)  # an interrupt came before `finish`
    received.gradients.delay(received.pairs, 8.0)  # a backward that reached none of them
    assert not received.gradients.are_pending


def test_masters_of_small_parameters_receive_in_the_same_memory_step_after_step(
    amp: ModuleType,
) -> None:
    """Beside a large one, whose gradient goes with the step, and one that gets none."""
    params = [nn.Parameter(torch.zeros(size)) for size in (3, 1 << 13, 2, 5)]
    model = nn.ParameterList(params)
    optimizer = SGD(params, lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    masters = list(amp.master_params(optimizer))
    addresses = []
    for step in range(1, 4):
        with amp.scale_loss(sum((p.float() * step).sum() for p in params[:3]), optimizer) as loss:
            loss.backward()
        assert [None if m.grad is None else set(m.grad.tolist()) for m in masters] == [
            *[{float(step)}] * 3,
            None,
        ]
        addresses.append([m.grad.data_ptr() for m in (masters[0], masters[2])])
        held = [weakref.ref(m.grad) for m in masters[:3]]
        optimizer.step()
        optimizer.zero_grad()
        assert [reference() is None for reference in held] == [False, True, False]
    assert addresses[0] == addresses[1] == addresses[2]
    assert set(masters[1].tolist()) == {-6.0}


def test_blocks_and_what_is_found_before_them_take_turns_with_tables_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half parameters alone have zeros that a script cleared by, before each block."""
    received = Received(is_lazy=False, in_place=1)
    made: list[ParamPairs] = []

    def noting(pairs: ParamPairs) -> GradientBuffers:
        made.append(pairs)
        return GradientBuffers(pairs)

    monkeypatch.setattr(passes, "GradientBuffers", noting)
    taking = received.gradients.passes
    for _ in range(3):
        received.backward(Pass((1, 2, 3), 8.0, ""))
        taking.finish(taking.receive(received.pairs, 8.0))
        received.step()
        received.backward(Pass((1, 2, 3), None, ""))
        received.pairs.model[-1].grad = None
        taking.finish(taking.receive(received.pairs, None))
    assert [len(pairs.model) for pairs in made] == [3, 2]
