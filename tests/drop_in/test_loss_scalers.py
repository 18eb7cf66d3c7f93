"""amp._amp_state.loss_scalers as scripts write to it, and what is said of a skipped step."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import scaled_backward
from torch import nn

import amp_patch.amp

SHARES_APEX = True
INF = float("inf")


@pytest.fixture
def amp(apex: types.ModuleType) -> Iterator[types.ModuleType]:
    """apex.amp, deactivated at the end."""
    yield apex.amp
    amp_patch.amp.deactivate()


@pytest.fixture
def LossScaler(apex: types.ModuleType) -> Any:
    return apex.amp.scaler.LossScaler


def prepared(amp: types.ModuleType, level: str = "O1", **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a small model, initialized; the model is its attribute."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})
    optimizer.model = model
    return optimizer


def scale_of(amp: types.ModuleType, optimizer: Any, loss_id: int = 0) -> float:
    """Return the factor that a loss of an optimizer is multiplied by."""
    with amp.scale_loss(torch.tensor(1.0), optimizer, loss_id=loss_id) as scaled_loss:
        return scaled_loss.item()


def backward(amp: types.ModuleType, optimizer: Any, loss_id: int = 0, value: float = 0.125) -> None:
    loss = optimizer.model(torch.ones(1, 2)).sum() * value
    scaled_backward(amp, loss, optimizer, loss_id=loss_id)


def test_a_script_puts_scalers_of_its_own_in_their_places(amp, LossScaler) -> None:
    optimizer = prepared(amp, num_losses=2)
    mine = [LossScaler("dynamic", init_scale=8.0, scale_window=1), LossScaler(32.0)]
    amp._amp_state.loss_scalers = mine
    assert all(a is b for a, b in zip(amp._amp_state.loss_scalers, mine, strict=True))
    assert (scale_of(amp, optimizer), scale_of(amp, optimizer, 1)) == (8.0, 32.0)
    # They move by what their losses find, each by its own rule.
    mine[0]._loss_scale = 8.0
    backward(amp, optimizer)
    assert (mine[0].loss_scale(), mine[1].loss_scale()) == (16.0, 32.0)
    backward(amp, optimizer, value=INF)
    assert mine[0].loss_scale() == 8.0
    assert mine[0]._has_overflow
    assert [one["loss_scale"] for one in amp.state_dict().values()] == [8.0, 32.0]
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    assert mine[0].loss_scale() == 2.0


def by_item(state: Any, scaler: Any) -> None:
    state.loss_scalers[0] = scaler


def by_slice(state: Any, scaler: Any) -> None:
    state.loss_scalers[:1] = [scaler]


def by_insert(state: Any, scaler: Any) -> None:
    state.loss_scalers.insert(0, scaler)
    del state.loss_scalers[1]


def by_pop(state: Any, scaler: Any) -> None:
    state.loss_scalers.insert(0, scaler)
    state.loss_scalers.pop(1)


def by_remove(state: Any, scaler: Any) -> None:
    first = state.loss_scalers[0]
    state.loss_scalers.insert(0, scaler)
    state.loss_scalers.remove(first)


def by_clear(state: Any, scaler: Any) -> None:
    kept = state.loss_scalers[1]
    state.loss_scalers.clear()
    state.loss_scalers.append(scaler)
    state.loss_scalers.extend([kept])


def by_reverse(state: Any, scaler: Any) -> None:
    del state.loss_scalers[0]
    state.loss_scalers += [scaler]
    state.loss_scalers.reverse()


def by_sort(state: Any, scaler: Any) -> None:
    first, second = state.loss_scalers
    state.loss_scalers.append(scaler)
    state.loss_scalers.sort(key=[scaler, second, first].index)


WAYS = [by_item, by_slice, by_insert, by_pop, by_remove, by_clear, by_reverse, by_sort]


@pytest.mark.parametrize("write", WAYS)
def test_every_way_to_write_to_a_list_is_followed(amp, LossScaler, write) -> None:
    optimizer = prepared(amp, num_losses=2)
    _, second = amp._amp_state.loss_scalers
    second._loss_scale = 4.0
    write(amp._amp_state, LossScaler(16.0))
    assert (scale_of(amp, optimizer), scale_of(amp, optimizer, 1)) == (16.0, 4.0)
    assert amp._amp_state.loss_scalers[1] is second


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), "file"])
def test_a_script_saves_them_whole_and_restores_them(amp, copied: Any, tmp_path: Path) -> None:
    optimizer = prepared(amp, num_losses=2)
    backward(amp, optimizer, 1, INF)
    backward(amp, optimizer)
    if copied == "file":
        torch.save({"scalers": amp._amp_state.loss_scalers}, tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt")["scalers"]
    else:
        saved = copied(amp._amp_state.loss_scalers)
    assert type(saved) is list
    again = prepared(amp, num_losses=2)
    assert scale_of(amp, again, 1) == 2.0**16
    amp._amp_state.loss_scalers = saved
    assert (scale_of(amp, again), scale_of(amp, again, 1)) == (2.0**16, 2.0**15)
    assert amp._amp_state.loss_scalers[0]._unskipped == 2


def test_more_scalers_are_more_losses(amp, LossScaler) -> None:
    """And those of earlier optimizers with other rules stay theirs."""
    static = prepared(amp, loss_scale=128.0, num_losses=2)
    optimizer = prepared(amp)
    amp._amp_state.loss_scalers.append(LossScaler(4.0))
    assert len(amp._amp_state.loss_scalers) == 2
    assert scale_of(amp, optimizer, 1) == 4.0
    assert (scale_of(amp, static), scale_of(amp, static, 1)) == (128.0, 128.0)


def test_one_scaler_may_serve_two_losses(amp, LossScaler) -> None:
    optimizer = prepared(amp, num_losses=2)
    one = LossScaler("dynamic", init_scale=64.0)
    amp._amp_state.loss_scalers = [one, one]
    backward(amp, optimizer, 1, INF)
    assert scale_of(amp, optimizer) == scale_of(amp, optimizer, 1) == one.loss_scale() == 32.0


def test_scalers_may_change_places(amp) -> None:
    optimizer = prepared(amp, num_losses=2)
    scalers = amp._amp_state.loss_scalers
    scalers[0]._loss_scale = 4.0
    amp._amp_state.loss_scalers = scalers[::-1]
    assert (scale_of(amp, optimizer), scale_of(amp, optimizer, 1)) == (2.0**16, 4.0)


def test_optimizers_that_share_a_scaler_share_the_one_in_its_place(amp, LossScaler) -> None:
    first, second = prepared(amp), prepared(amp)
    amp._amp_state.loss_scalers[0] = LossScaler(16.0)
    assert scale_of(amp, first) == scale_of(amp, second) == 16.0


def test_what_is_no_list_of_scalers_is_refused(amp, LossScaler) -> None:
    optimizer = prepared(amp)
    for wrong in (3.0, [3.0], [LossScaler(4.0), None], LossScaler(4.0)):
        with pytest.raises(TypeError, match=r"must be a list of LossScaler objects; got .*; call"):
            amp._amp_state.loss_scalers = wrong
    with pytest.raises(TypeError, match=r"must be a list of LossScaler objects; got .*; call"):
        amp._amp_state.loss_scalers[0] = {"loss_scale": 4.0}
    assert scale_of(amp, optimizer) == 2.0**16


def test_before_initialize_they_are_kept_and_then_replaced(amp, LossScaler) -> None:
    """A list may be put there as apex's own initialize did it, item after item."""
    amp._amp_state.loss_scalers = []
    for scale in (4.0, 8.0):
        amp._amp_state.loss_scalers.append(LossScaler(scale))
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0, 8.0]
    optimizer = prepared(amp)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [2.0**16]
    assert scale_of(amp, optimizer) == 2.0**16
    for _ in range(2):
        amp_patch.amp.deactivate()
        assert not hasattr(amp._amp_state, "loss_scalers")
        amp._amp_state.loss_scalers = [LossScaler(4.0)]


def test_a_disabled_run_takes_them_without_effect(amp, LossScaler) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [1.0]
    amp._amp_state.loss_scalers[0] = LossScaler(4.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0
    amp._amp_state.loss_scalers = [LossScaler(8.0)]
    assert amp._amp_state.loss_scalers[0].loss_scale() == 8.0
    assert scale_of(amp, optimizer) == 1.0


def test_a_check_that_is_open_moves_the_scaler_that_it_was_made_with(amp, LossScaler) -> None:
    optimizer = prepared(amp)
    before = amp._amp_state.loss_scalers[0]
    loss = optimizer.model(torch.ones(1, 2)).sum() * INF
    with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
        scaled_loss.backward()
    amp._amp_state.loss_scalers = [LossScaler("dynamic", init_scale=4.0)]
    optimizer.step()
    assert before.loss_scale() == 2.0**15
    assert scale_of(amp, optimizer) == 4.0


def test_the_state_pickles_by_its_name(amp) -> None:
    """cloudpickle takes along what a script of jobs has as globals."""
    assert pickle.loads(pickle.dumps(amp._amp_state)) is amp._amp_state


# -- what was found --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("stashed", [False, True])
def test_unscale_notes_an_overflow_in_the_buffer(LossScaler, scale, stashed: bool) -> None:
    """apex's kernels did, at a static scale as well; scripts that find has_fused_kernel read it."""
    scaler = LossScaler(scale)
    assert scaler.has_fused_kernel
    master = torch.zeros(2)
    found = []
    for value in (1.0, INF, 1.0):
        grads = [torch.tensor([1.0, value]).half()]
        if stashed:
            scaler.unscale_with_stashed(grads, [torch.ones(2)], [master])
        else:
            scaler.unscale(grads, [master])
        found.append(scaler._overflow_buf.item())
    assert found == [0, 1, 1]  # until a script clears it
    assert scaler._has_overflow == (scale == "dynamic")
    scaler.clear_overflow_state()
    assert (scaler._overflow_buf.item(), scaler._has_overflow) == (0, False)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_the_buffer_tells_what_a_backward_found(amp, level: str, delay: bool) -> None:
    optimizer = prepared(amp, level, num_losses=2)
    scaler, other = amp._amp_state.loss_scalers
    found = []
    for value in (0.125, INF, 0.125):
        loss = optimizer.model(torch.ones(1, 2)).sum() * value
        scaled_backward(amp, loss, optimizer, delay_overflow_check=delay)
        found.append(scaler._overflow_buf.item())
        assert scaler._has_overflow == (value == INF and not delay)
        if delay:
            assert scaler.update_scale() == (value == INF)
            assert scaler._overflow_buf.item() == (value == INF)
        optimizer.zero_grad()
    assert found == [0, 1, 0]
    assert scaler.loss_scale() == 2.0**15
    assert other._overflow_buf.item() == 0
    other._overflow_buf.fill_(1)  # what a script writes stays, whatever another loss finds
    backward(amp, optimizer)
    assert other._overflow_buf.item() == 1


# -- methods of a script's own ---------------------------------------------------------------------


class Elsewhere:
    """What another rank found, as a script's all_reduce would return it, and the calls for it."""

    def __init__(self) -> None:
        self.found, self.calls = False, 0

    def reduce(self, here: Any) -> bool:
        self.calls += 1
        return bool(here) or self.found


def on_the_class(amp: Any, LossScaler: Any, elsewhere: Elsewhere, patch: Any) -> None:
    """ONNX Runtime's way: a method that does all of it, and calls no other."""

    def update_scale(self: Any) -> bool:
        if self.has_fused_kernel and self.dynamic and not self._has_overflow:
            self._has_overflow = self._overflow_buf.item()
        self._has_overflow = elsewhere.reduce(self._has_overflow)
        if self._has_overflow:
            self._loss_scale, self._unskipped = self._loss_scale / 2, 0
        else:
            self._unskipped += 1
        return self._has_overflow

    patch.setattr(LossScaler, "update_scale", update_scale)


def on_the_object(amp: Any, LossScaler: Any, elsewhere: Elsewhere, patch: Any) -> None:
    scaler = amp._amp_state.loss_scalers[0]
    inside = scaler.update_scale

    def update_scale() -> bool:
        scaler._has_overflow = elsewhere.reduce(scaler._overflow_buf.item())
        return inside()

    scaler.update_scale = update_scale


def in_a_subclass(amp: Any, LossScaler: Any, elsewhere: Elsewhere, patch: Any) -> None:
    """Colossal-AI's way."""

    class Reducing(LossScaler):
        def unscale(self, *args: Any, **kwargs: Any) -> None:
            super().unscale(*args, **kwargs)
            self._overflow_buf.fill_(elsewhere.reduce(self._overflow_buf.item()))
            self._has_overflow = self._overflow_buf.item()

    amp._amp_state.loss_scalers[0] = Reducing("dynamic")


WAYS = [on_the_class, on_the_object, in_a_subclass]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_methods_of_a_script_decide_about_the_step(
    amp, LossScaler, monkeypatch, level: str, way: Any
) -> None:
    elsewhere = Elsewhere()
    optimizer = prepared(amp, level)
    way(amp, LossScaler, elsewhere, monkeypatch)
    scaler, seen = amp._amp_state.loss_scalers[0], []
    for value, found in [(0.125, False), (0.125, True), (INF, False), (0.125, False)]:
        elsewhere.found = found
        before = [param.detach().clone() for param in amp.master_params(optimizer)]
        optimizer.zero_grad()
        backward(amp, optimizer, value=value)
        optimizer.step()
        after = list(amp.master_params(optimizer))
        is_same = all(map(torch.equal, before, after))
        assert is_same == amp_patch.amp.step_was_skipped(optimizer)
        seen.append((is_same, scaler.loss_scale(), scaler._unskipped))
    assert seen == [
        (False, 2.0**16, 1),
        (True, 2.0**15, 0),
        (True, 2.0**14, 0),
        (False, 2.0**14, 1),
    ]
    assert elsewhere.calls == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_check_left_to_a_script_is_decided_once_by_its_methods(
    amp, LossScaler, monkeypatch, way: Any
) -> None:
    elsewhere = Elsewhere()
    optimizer = prepared(amp, "O2")
    way(amp, LossScaler, elsewhere, monkeypatch)
    scaler = amp._amp_state.loss_scalers[0]
    for value in (INF, 0.125):
        loss = optimizer.model(torch.ones(1, 2)).sum() * value
        scaled_backward(amp, loss, optimizer, delay_overflow_check=True)
        assert scaler.update_scale() == (value == INF)
        if value == INF:
            optimizer.zero_grad()
        else:
            optimizer.step()
    assert (scaler.loss_scale(), scaler._unskipped, elsewhere.calls) == (2.0**15, 1, 2)
    assert not amp_patch.amp.step_was_skipped(optimizer)


def test_a_static_scale_leaves_the_step_to_a_scripts_method(amp, LossScaler, monkeypatch) -> None:
    optimizer = prepared(amp, "O1", loss_scale=8.0)
    monkeypatch.setattr(LossScaler, "update_scale", lambda self: self._overflow_buf.item() == 0)
    backward(amp, optimizer)
    optimizer.step()
    assert amp_patch.amp.step_was_skipped(optimizer)
    monkeypatch.undo()
    backward(amp, optimizer)
    optimizer.step()
    assert not amp_patch.amp.step_was_skipped(optimizer)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_script_that_scales_by_hand_is_not_told_to_scale(amp, apex, by_hand: bool) -> None:
    """Adasum's optimizer steps in hooks of the backward, and finds overflows by amp_C."""
    optimizer = prepared(amp)
    scaler, weight = amp._amp_state.loss_scalers[0], optimizer.model.weight
    before = weight.detach().clone()
    loss = optimizer.model(torch.ones(1, 2)).float().sum() * 2.0**-10
    (loss * scaler.loss_scale()).backward()
    grads = [param.grad for param in optimizer.model.parameters()]
    told = pytest.warns(UserWarning, match="every loss is to be multiplied by it")
    if by_hand:
        importlib.import_module("amp_C").multi_tensor_scale(
            65536, scaler._overflow_buf, [grads, grads], 1 / scaler.loss_scale()
        )
        told = contextlib.nullcontext()
    with told:
        optimizer.step()
    step = 0.1 * 2.0**-10 * (1 if by_hand else 2.0**16)
    torch.testing.assert_close(weight.detach(), before - step)


# -- no optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("none", [[], ()])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_without_optimizers_a_loss_is_scaled_and_nothing_moves(amp, level: str, none) -> None:
    """MadryLab's attacks: the gradient of the input, of which only the sign counts."""
    optimizer = prepared(amp, level)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 8.0 if level != "O0" else 1.0
    before, saved = scaler.__getstate__(), copy.deepcopy(optimizer.model.state_dict())
    inputs = torch.ones(1, 2, requires_grad=True)
    with amp.scale_loss(optimizer.model(inputs).sum(), none) as scaled_loss:
        assert scaled_loss.dtype is torch.float32
        scaled_loss.backward()
    expected = scaler.loss_scale() * saved["weight"].float().sum(0, keepdim=True)
    torch.testing.assert_close(inputs.grad, expected, rtol=2e-3, atol=1e-3)
    assert scaler.__getstate__() == before
    if level != "O0":  # the model's gradients are scaled still: a step with them is refused
        with pytest.raises(RuntimeError, match="needs unscaled gradients"):
            optimizer.step()
    optimizer.zero_grad()
    backward(amp, optimizer)
    optimizer.step()
    assert not torch.equal(optimizer.model.state_dict()["weight"], saved["weight"])


# -- messages --------------------------------------------------------------------------------------


def line(loss_id: int, scale: float) -> str:
    return (
        f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scale}"
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("overflows", "scale"),
    [
        ([0, 1], 2.0**15),
        ([0, 0], 2.0**14),
        ([0, 1, 0], 2.0**14),
        ([0, 1, 1], 2.0**15),
    ],
)
def test_of_several_overflows_before_a_step_the_first_is_named(
    amp, capsys, level: str, overflows: list[int], scale: float
) -> None:
    """apex printed at the step, once: the first loss's number, and what its scale is by then."""
    optimizer = prepared(amp, level, num_losses=2, verbosity=1)
    for first in (0, 1, 0):
        for scaler in amp._amp_state.loss_scalers:
            scaler._loss_scale = 2.0**16
        capsys.readouterr()
        for loss_id in overflows:
            backward(amp, optimizer, loss_id ^ first, INF)
        optimizer.step()
        (said,) = capsys.readouterr().out.splitlines()
        assert said.partition("; not finite: ")[0] == line(first, scale)
        optimizer.zero_grad()
