"""Masters are rounded into half weights, but those that a step left out; what is known of both."""

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from fine_linear import FINE, backward, copies, fine_linear, prepared
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.master_pairs import MasterPairs
from amp_patch.weights.moved_masters import MovedMasters
from amp_patch.weights.rounding import Rounding
from amp_patch.weights.unseen_master_writes import UnseenMasterWrites

LEVELS = {"O2": torch.float16, "O5": torch.bfloat16}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
def test_a_graph_goes_on_behind_a_step_that_left_its_weights_out(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    """The backward of a second head comes after the step of the first one."""
    model = nn.ModuleList([fine_linear(), fine_linear()])
    optimizer = Adam(model.parameters(), lr=0.125)
    amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, fused_step=fused_step
    )
    inputs = torch.ones(2, 4, dtype=LEVELS[level], requires_grad=True)
    losses = [head(inputs).sum() for head in model]
    optimizer.step()  # without any gradients
    for loss in losses:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        before = copies(model)
        optimizer.step()
        changed = [not torch.equal(before[name], now) for name, now in copies(model).items()]
        assert changed == (
            [True, True, False, False] if loss is losses[0] else [False] * 2 + [True] * 2
        )
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("make", [SGD, Adam, functools.partial(Adam, fused=True)])
def test_a_graph_whose_weights_were_stepped_is_refused_by_torch(
    amp: ModuleType, level: str, make: Callable[..., Optimizer], fused_step: bool
) -> None:
    model, optimizer = prepared(amp, level, make=make, fused_step=fused_step)
    inputs = torch.ones(2, 4, dtype=LEVELS[level], requires_grad=True)
    loss = model(inputs).sum()
    backward(amp, model, optimizer)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        amp.scale_loss(loss, optimizer) as scaled_loss,
    ):
        scaled_loss.backward()


def roundings() -> tuple[MasterPairs, MovedMasters, Rounding]:
    params = [nn.Parameter(torch.full((3,), 1 + FINE).half()) for _ in range(2)]
    values = FP32Values()
    pairs = MasterPairs(SGD(params, lr=0.1), values, None, ())
    pairs.replace(params)
    moved = MovedMasters(pairs, UnseenMasterWrites(values.sums), may_move=False)
    return pairs, moved, Rounding(pairs, values, moved)


def test_what_is_known_holds_until_tensors_are_elsewhere() -> None:
    pairs, moved, rounding = roundings()
    known = [rounding.renew()]
    assert rounding.renew() is known[0]
    pairs.params[0].data = pairs.params[0].data.clone()
    known.append(rounding.renew())
    pairs.masters[1].data = pairs.masters[1].data + 1
    moved.note_set(pairs.masters[1])
    version = pairs.masters[1]._version
    known.append(rounding.renew())
    assert pairs.masters[1]._version == version + 1
    rounding.forget()
    assert rounding.comparison is None
    known.append(rounding.renew())
    assert pairs.masters[1]._version == version + 1
    assert len(set(map(id, known))) == 4
    rounding.write()
    assert pairs.params[1].eq(2).all()


def test_half_weights_that_are_left_out_count_as_not_written_to() -> None:
    pairs, _, rounding = roundings()
    rounding.renew()
    before = pairs.half_versions()
    rounding.write(pairs.params[:1])
    assert [now > then for now, then in zip(pairs.half_versions(), before, strict=True)] == [
        False,
        True,
    ]


def test_the_masters_of_some_rows_are_shown_alone() -> None:
    pairs, _, rounding = roundings()
    for master in pairs.masters:
        master.data.fill_(2)
    rounding.write_rows([1])
    assert [param[0].item() for param in pairs.params] == [1, 2]
    rounding.reconcile_these({id(pairs.masters[0]): False})
    assert pairs.masters[0].eq(1).all()
