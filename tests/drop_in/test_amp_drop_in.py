"""apex.amp: what scripts find after `initialize`, and do by it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import io
import itertools
import pickle
import sys
import types
import warnings
import weakref

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from support import scaled_backward
from torch import nn

import amp_patch.amp
import amp_patch.session

SHARES_APEX = True
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


@pytest.fixture
def amp(apex: types.ModuleType, monkeypatch: pytest.MonkeyPatch):
    for switch in ("hard_override", "allow_incoming_model_not_fp32"):  # which scripts set
        monkeypatch.setattr(apex.amp._amp_state, switch, False)
    yield apex.amp
    amp_patch.amp.deactivate()


def trained(amp, level: str = "O2", **options):
    """Return a small model and its optimizer, initialized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def backward(amp, model, optimizer, value: float = 1.0, **options) -> None:
    loss = (model(torch.full((3, 4), value)) + torch.arange(3.0)[:, None]).float().pow(2).mean()
    scaled_backward(amp, loss, optimizer, **options)


# -- names -----------------------------------------------------------------------------------------


def test_amp_state_is_one_object_as_attribute_and_as_module(amp) -> None:
    module = importlib.import_module("apex.amp._amp_state")
    assert module is amp._amp_state is module._amp_state
    assert isinstance(module, types.ModuleType)
    assert module.master_params is amp.master_params


def test_before_initialize_scripts_see_no_properties(amp) -> None:
    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(amp._amp_state, "loss_scalers")
    for name in ("opt_properties", "loss_scalers", "no_such_thing"):
        with pytest.raises(AttributeError, match=f"'AmpState' object has no attribute '{name}'$"):
            getattr(amp._amp_state, name)
    trained(amp)
    assert amp._amp_state.opt_properties.enabled
    amp_patch.amp.deactivate()
    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(amp._amp_state, "handle")


@pytest.mark.parametrize("level", LEVELS)
def test_properties_are_those_of_the_level(amp, level: str) -> None:
    trained(amp, level)
    properties = amp._amp_state.opt_properties
    assert properties.opt_level == properties.options["opt_level"] == level
    expected = {"O0": torch.float32, "O1": None, "O4": None, "O5": torch.bfloat16}
    assert properties.options["cast_model_type"] == expected.get(level, torch.float16)
    assert properties.master_weights is {"O2": True, "O5": True, "O1": None, "O4": None}.get(
        level, False
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = properties.nothing


def test_the_submodule_amp_initializes(amp) -> None:
    model = nn.Linear(2, 2)
    amp.amp.initialize(model, opt_level="O3", verbosity=0)
    assert model.weight.dtype is torch.float16
    assert not hasattr(amp.amp, "scale_loss")


def test_levels_are_functions_that_set_properties(amp) -> None:
    properties = amp.frontend.opt_levels["O2"](amp.frontend.Properties())
    assert properties.master_weights is True
    assert amp.frontend.O1.brief.startswith("O1:  Insert automatic casts")


# -- loss scalers ----------------------------------------------------------------------------------


def test_a_scale_that_a_script_sets_is_the_one_used(amp) -> None:
    model, optimizer = trained(amp)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 4.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 0}
    with amp.scale_loss(torch.tensor(3.0), optimizer) as scaled_loss:
        assert scaled_loss.item() == 12.0
    assert amp._amp_state.loss_scalers[0] is scaler
    assert (scaler.loss_scale(), scaler._unskipped, scaler.dynamic) == (4.0, 1, True)


def test_fields_of_a_scaler_follow_the_steps_and_set_the_rule(amp) -> None:
    model, optimizer = trained(amp)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._scale_seq_len = 2
    scaler._max_loss_scale = 4.0
    backward(amp, model, optimizer, value=float("inf"))
    assert (scaler._has_overflow, scaler._unskipped, scaler.loss_scale()) == (True, 0, 2.0**15)
    model[1].reset_running_stats()
    optimizer.step()
    scaler._loss_scale = 1.0
    for _ in range(8):
        optimizer.zero_grad()
        backward(amp, model, optimizer)
        optimizer.step()
    assert not scaler._has_overflow
    assert scaler.loss_scale() == 4.0


def test_the_scalers_shown_are_those_of_the_last_initialize(amp) -> None:
    _, first = trained(amp, "O2")
    _, second = trained(amp, "O0", num_losses=2)
    shown = amp._amp_state.loss_scalers
    assert [scaler.dynamic for scaler in shown] == [False, False]
    shown[0]._loss_scale = 8.0
    with amp.scale_loss(torch.tensor(1.0), second) as scaled_loss:
        assert scaled_loss.item() == 8.0
    with amp.scale_loss(torch.tensor(1.0), first) as scaled_loss:
        assert scaled_loss.item() == 2.0**16


@pytest.mark.parametrize("level", LEVELS)
def test_a_schedule_gated_on_clean_passes_moves_at_every_level(amp, level: str) -> None:
    model, optimizer = trained(amp, level)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    backward(amp, model, optimizer)
    assert amp._amp_state.loss_scalers[0]._unskipped == 1


def test_disabled_amp_has_state_that_lets_schedules_move(amp) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    assert not amp._amp_state.opt_properties.enabled
    assert amp._amp_state.loss_scalers[0]._unskipped != 0
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    with amp.scale_loss(torch.tensor(3.0), optimizer) as scaled_loss:
        assert scaled_loss.item() == 3.0


def test_a_scaler_of_the_scripts_own_follows_the_rule(amp) -> None:
    scaler = amp.scaler.LossScaler("dynamic", init_scale=8.0, scale_window=2, max_loss_scale=16.0)
    finite, target = [torch.full((3,), 16.0)], [torch.zeros(3)]
    scaler.unscale(finite, target, scaler.loss_scale())
    torch.testing.assert_close(target[0], torch.full((3,), 2.0))
    assert scaler.update_scale() is False
    scaler.unscale([torch.tensor([float("inf")])], [torch.zeros(1)])
    assert scaler._has_overflow
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 4.0
    scaler.clear_overflow_state()
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is True
    scaler.clear_overflow_state()
    results = [scaler.update_scale() for _ in range(6)]
    assert (results, scaler.loss_scale()) == ([False] * 6, 16.0)
    static = amp.scaler.LossScaler(128.0)
    static._overflow_buf.fill_(1)
    assert static.update_scale() is False
    assert static.loss_scale() == 128.0


def test_unscale_with_stashed_adds_in_fp32(amp) -> None:
    scaler = amp.scaler.LossScaler(1024.0)
    half = torch.tensor([1024.0, 0.5]).half()
    master = torch.zeros(2)
    scaler.unscale_with_stashed([half], [torch.tensor([1e-4, 2.0])], [master])
    torch.testing.assert_close(master, torch.tensor([1.0001, 2.0 + 0.5 / 1024]), rtol=1e-6, atol=0)
    scaler.unscale_with_stashed([half], [torch.ones(2)], [master], scale_override=(2.0, 4.0, 8.0))
    torch.testing.assert_close(master, torch.tensor([4098.0, 4.0]))


@pytest.mark.parametrize("loss_scale", ["dynamic", 32.0])
def test_a_scaler_pickles_and_apexs_own_pickles_load(amp, loss_scale) -> None:
    scaler = amp.scaler.LossScaler(loss_scale, scale_window=3)
    scaler._loss_scale, scaler._unskipped = 16.0, 2
    again = pickle.loads(pickle.dumps(scaler))
    assert again.__getstate__() == scaler.__getstate__()
    apexs = amp.scaler.LossScaler.__new__(amp.scaler.LossScaler)
    apexs.__setstate__(
        {
            "dynamic": True,
            "_loss_scale": 512.0,
            "_max_loss_scale": 2.0**24,
            "_min_loss_scale": None,
            "_scale_seq_len": 2000,
            "_unskipped": 7,
            "_has_overflow": False,
            "_overflow_buf": torch.zeros(1, dtype=torch.int32),
        }
    )
    assert (apexs.loss_scale(), apexs._unskipped, apexs.dynamic) == (512.0, 7, True)


def test_a_script_takes_the_overflow_check_over(amp) -> None:
    """BERT's scripts reduce the gradients themselves, and move the scale by what they found."""
    model, optimizer = trained(amp)
    scaler = amp._amp_state.loss_scalers[0]
    for found, scale in ((0, 2.0**10), (1, 2.0**9)):
        scaler._loss_scale = 2.0**10
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        backward(amp, model, optimizer, delay_overflow_check=True)
        assert scaler._unskipped == 0  # the check is left to the script
        overflow_buf = torch.full((1,), found, dtype=torch.int32)
        old, scaler._overflow_buf = scaler._overflow_buf, overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old
        assert (had_overflow, scaler.loss_scale()) == (bool(found), scale)
        if had_overflow:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
            for param in model.parameters():
                param.grad = None
        else:
            optimizer.step()
            assert scaler._unskipped == 1
        assert torch.equal(before, model[0].weight) == had_overflow
        scaler._unskipped = 0


def test_a_check_taken_over_says_what_it_found(amp) -> None:
    model, optimizer = trained(amp)
    backward(amp, model, optimizer, value=float("inf"), delay_overflow_check=True)
    assert amp._amp_state.loss_scalers[0].update_scale() is True
    assert amp._amp_state.loss_scalers[0]._overflow_buf.item() == 1  # also where it comes late
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**15


# -- optimizers ------------------------------------------------------------------------------------


def test_the_stash_shows_half_parameters_and_masters(amp) -> None:
    model, optimizer = trained(amp)
    stash = optimizer._amp_stash
    assert stash.all_fp16_params == [*model[0].parameters(), *model[2].parameters()]
    assert stash.all_fp32_from_fp32_params == list(model[1].parameters())
    assert [master.dtype for master in stash.all_fp32_from_fp16_params] == [torch.float32] * 4
    masters = {id(param) for param in amp.master_params(optimizer)}
    assert {id(param) for param in stash.all_fp32_from_fp16_params} < masters
    for half, master in zip(stash.fp16_groups[0], stash.fp32_from_fp16_groups[0], strict=True):
        torch.testing.assert_close(half.float(), master, rtol=1e-3, atol=1e-3)
    assert stash.fp32_from_fp32_groups == [stash.all_fp32_from_fp32_params]
    assert len(stash.all_fp32_from_fp32_grad_stash) == 2
    assert stash.lazy_init_called
    assert not stash.params_have_scaled_gradients
    backward(amp, model, optimizer, delay_unscale=True)
    assert stash.params_have_scaled_gradients


def test_levels_without_masters_show_the_parameters(amp) -> None:
    model, optimizer = trained(amp, "O1")
    assert optimizer._amp_stash.all_fp32_params == list(model.parameters())
    assert optimizer._amp_stash.all_fp16_params == []
    assert optimizer._amp_stash.all_fp32_from_fp16_params == []


def test_deactivate_takes_off_what_initialize_put_on_an_optimizer(amp) -> None:
    _, optimizer = trained(amp)
    assert optimizer._amp_stash is not None
    amp_patch.amp.deactivate()
    assert not [name for name in vars(optimizer) if "amp" in name or "master" in name]


def test_masters_saved_by_scripts_are_restored_by_scripts(amp) -> None:
    """The way round apex's rounded checkpoints that scripts took."""
    model, optimizer = trained(amp)
    for _ in range(3):
        backward(amp, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    text = io.BytesIO()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
        "master params": list(amp.master_params(optimizer)),
    }
    torch.save(saved, text)
    expected = [param.detach().clone() for param in amp.master_params(optimizer)]
    amp_patch.amp.deactivate()

    torch.manual_seed(5)
    model, optimizer = trained(amp)
    text.seek(0)
    checkpoint = torch.load(text)
    model.load_state_dict(checkpoint["model"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(
        amp.master_params(optimizer), checkpoint["master params"], strict=True
    ):
        param.data.copy_(saved_param.data)
    amp.load_state_dict(checkpoint["amp"])
    for param, value in zip(amp.master_params(optimizer), expected, strict=True):
        assert torch.equal(param, value)
    backward(amp, model, optimizer)
    optimizer.step()


def test_a_script_publishes_masters_itself(amp) -> None:
    model, optimizer = trained(amp)
    with torch.no_grad():
        for param in amp.master_params(optimizer):
            param.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert torch.equal(model[0].weight, torch.full((8, 4), 0.5).half())


def test_a_script_unscales_by_apexs_own_steps(amp) -> None:
    model, optimizer = trained(amp)
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 64.0
    backward(amp, model, optimizer)
    expected = [param.grad.clone() for param in amp.master_params(optimizer)]
    optimizer.zero_grad()
    optimizer._prepare_amp_backward()
    loss = (model(torch.ones(3, 4)) + torch.arange(3.0)[:, None]).float().pow(2).mean()
    (loss * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    assert scaler.update_scale() is False
    for param, grad in zip(amp.master_params(optimizer), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    optimizer.step()


@contextlib.contextmanager
def scale_loss_of_a_script(amp, loss, optimizer, delay_unscale: bool = False):
    """What some repositories have in the place of apex's, in terms of its optimizers."""
    scaler, stash = amp._amp_state.loss_scalers[0], optimizer._amp_stash
    if not delay_unscale and not stash.params_have_scaled_gradients:
        optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    if delay_unscale:
        stash.params_have_scaled_gradients = True
        return
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    stash.params_have_scaled_gradients = False
    if scaler.update_scale() and not stash.already_patched:
        step = optimizer.step

        def skip_step() -> None:
            optimizer.step = step
            stash.already_patched = False

        optimizer.step = skip_step
        stash.already_patched = True


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_loss_of_the_scripts_own_trains_as_amps(amp, level: str) -> None:
    results = []
    for scale_loss in (amp.scale_loss, functools.partial(scale_loss_of_a_script, amp)):
        model, optimizer = trained(amp, level)
        for step, value in enumerate([1.0, 1.0, float("inf"), 1.0, 1.0]):
            optimizer.zero_grad()
            for delay in (True, False) if step in (1, 4) else (False,):
                loss = (model(torch.full((3, 4), 0.5)).float() * value).pow(2).mean()
                with scale_loss(loss * 2.0**-6, optimizer, delay_unscale=delay) as scaled_loss:
                    scaled_loss.backward()
                assert optimizer._amp_stash.params_have_scaled_gradients == delay
            assert optimizer._amp_stash.already_patched == (value != 1.0)
            optimizer.step()
            assert not optimizer._amp_stash.already_patched
        scaler = amp._amp_state.loss_scalers[0]
        results.append((scaler.loss_scale(), scaler._unskipped, list(model.state_dict().values())))
        amp_patch.amp.deactivate()
    assert results[0][:2] == results[1][:2] == (2.0**15, 2)
    assert all(map(torch.equal, results[0][2], results[1][2]))


def test_what_a_script_says_of_its_gradients_holds(amp) -> None:
    model, optimizer = trained(amp, "O1")
    scaler, stash = amp._amp_state.loss_scalers[0], optimizer._amp_stash
    scaler._loss_scale = 64.0
    backward(amp, model, optimizer, delay_unscale=True)
    scaled = [param.grad.clone() for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    scaler.unscale(grads, grads, None, models_are_masters=True)
    stash.params_have_scaled_gradients = False
    optimizer.step()  # which refuses scaled gradients
    momentum = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
    for found, grad in zip(momentum, scaled, strict=True):
        torch.testing.assert_close(found, grad / 64)
    before = model[0].weight.detach().clone()
    backward(amp, model, optimizer)
    stash.already_patched = True
    optimizer.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ["_prepare_amp_backward", "_post_amp_backward"])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_method_for_gradients_that_a_script_replaced_is_told_of(amp, name, in_list) -> None:
    """ONNX Runtime's does in fewer kernels what apex did: the gradients are right without it."""
    weights = []
    for replaces in (False, True):
        model, optimizer = trained(amp)
        given = [optimizer] if in_list else optimizer
        backward(amp, model, given)  # without a warning
        optimizer.zero_grad()
        told = contextlib.nullcontext()
        if replaces:
            setattr(optimizer, name, pytest.fail)
            told = pytest.warns(UserWarning, match=f"SGD with {name} of the script's own")
        with told:
            backward(amp, model, given)
        optimizer.step()
        weights.append(model[0].weight.detach().clone())
        amp_patch.amp.deactivate()
    assert torch.equal(*weights)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_a_script_scaled_are_unscaled_with_those_of_the_block(amp, level) -> None:
    """A transducer makes a backward in its forward, of what it scales itself."""
    gradients = []
    for is_scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_scaled:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            first = model(torch.ones(2, 3)).square().mean()
            (first * amp._amp_state.loss_scalers[0].loss_scale()).backward()
            optimizer._prepare_amp_backward = lambda: None
            optimizer._amp_stash.params_have_scaled_gradients = True
            with pytest.warns(UserWarning, match="params_have_scaled_gradients = True"):
                scaled_backward(amp, model(torch.ones(2, 3)).square().mean(), optimizer)
        else:
            for _ in range(2):
                model(torch.ones(2, 3)).square().mean().backward()
        gradients.append([one.grad.float() for one in amp.master_params(optimizer)])
    for found, expected in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)


def test_what_initialize_returns_may_be_thrown_away(amp) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model(torch.ones(2, 3)).dtype is torch.float32
    assert model.weight.dtype is torch.float16
    assert optimizer.param_groups[0]["params"][0].dtype is torch.float32


def test_an_fp16_optimizer_is_refused(apex, amp) -> None:
    model = nn.Linear(2, 2).half()
    optimizer = apex.fp16_utils.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="got an FP16_Optimizer; call amp.initialize"):
        amp.initialize(nn.Linear(2, 2), optimizer)


# -- half models, and what a level refuses ---------------------------------------------------------


def test_half_models_are_taken_where_a_script_allows_them(amp) -> None:
    model = nn.Linear(2, 2).half()
    with pytest.raises(RuntimeError, match="models must come in float32"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=False, verbosity=0)
    assert next(amp.master_params(optimizer)).dtype is torch.float32


def test_hard_override_prints_what_a_level_refuses_and_does_it(
    amp, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="cast_model_type"):
        amp.initialize(model, opt_level="O1", cast_model_type=torch.float16, verbosity=0)
    amp._amp_state.hard_override = True
    amp.initialize(model, opt_level="O1", cast_model_type=torch.float16, verbosity=0)
    assert capsys.readouterr().out.startswith("Warning:  ")
    assert model.weight.dtype is torch.float16


class Mixed(nn.Module):
    """One parameter in fp32 and one in fp16, as in apex's own tests."""

    def __init__(self, unique: int) -> None:
        super().__init__()
        self.weight0 = nn.Parameter(unique + torch.arange(2.0))
        self.weight1 = nn.Parameter(1 + unique + torch.arange(2.0).half())

    def forward(self, x):
        return (x * self.weight0.float() * self.weight1.float()).sum()


def steps_of_mixed(models, optimizer, losses, overflow_at: int | None) -> None:
    """Train two models for two clean steps; one more overflows, if asked for."""
    for iteration in range(2 if overflow_at is None else 3):
        optimizer.zero_grad()
        for index, model in enumerate(models):
            losses(model(torch.ones(2)), index, iteration == overflow_at)
        optimizer.step()


@pytest.mark.parametrize("overflow_at", [None, 0, 1])
@pytest.mark.parametrize("kept", [None, "weight0", "weight1"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_mixed_models_train_as_without_amp(amp, level, kept, overflow_at) -> None:
    if overflow_at is not None and (kept is None or level in ("O0", "O3")):
        pytest.skip("there is no overflow to put there")

    def built():
        models = [Mixed(1), Mixed(2)]
        groups = [{"params": m.parameters(), "lr": 0.25 * (i + 1)} for i, m in enumerate(models)]
        return models, torch.optim.SGD(groups, momentum=0.125)

    reference, plain = built()
    steps_of_mixed(reference, plain, lambda loss, *_: loss.backward(), None)
    models, optimizer = built()
    amp._amp_state.allow_incoming_model_not_fp32 = True
    options = {"cast_model_type": False, "num_losses": 2, "verbosity": 0}
    amp.initialize(models, optimizer, opt_level=level, **options)
    for scaler, scale in zip(amp._amp_state.loss_scalers, (4.0, 16.0), strict=True):
        scaler._loss_scale = scale

    def losses(loss, index, overflows):
        with amp.scale_loss(loss, optimizer, loss_id=index) as scaled_loss:
            scaled_loss.backward()
            if overflows and index == 0:
                getattr(models[0], kept).grad[0] = float("inf")

    steps_of_mixed(models, optimizer, losses, overflow_at)
    params = itertools.chain(*(model.parameters() for model in models))
    expected = itertools.chain(*(model.parameters() for model in reference))
    for param, master, value in zip(params, amp.master_params(optimizer), expected, strict=True):
        assert torch.equal(param, master.to(param.dtype))
        torch.testing.assert_close(param, value, rtol=1e-3, atol=0)


# -- forward called directly -----------------------------------------------------------------------


class Doubling(nn.Module):
    """Shows the dtype that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x, factor=2.0):
        self.seen.append(x.dtype)
        return self.linear(x) * factor


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.forward(x)])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_direct_call_of_forward_casts_as_a_call_does(amp, level: str, call) -> None:
    model = Doubling()
    amp.initialize(model, opt_level=level, verbosity=0)
    hooked = []
    model.register_forward_pre_hook(lambda *_: hooked.append(1))
    for _ in range(2):
        assert call(model, torch.ones(1, 2)).dtype is torch.float32
    assert model.seen == [model.linear.weight.dtype] * 2
    assert len(hooked) == 2
    assert str(inspect.signature(model.forward)) == "(x, factor=2.0)"
    amp_patch.amp.deactivate()
    assert "forward" not in vars(model)
    assert model.forward(torch.ones(1, 2)).dtype is torch.float32


class OwnCall(Doubling):
    """Calls `forward` without torch's hooks, as a Gaussian process of gpytorch does."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) + 1.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_call_of_the_class_s_own_casts_in_the_forward_that_it_calls(amp, level: str) -> None:
    torch.manual_seed(0)
    model = OwnCall()
    x = torch.randn(3, 2)
    expected = model(x).detach(), model.forward(x).detach()
    amp.initialize(model, opt_level=level, verbosity=0)
    for found, one in zip((model(x), model.forward(x)), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0.05, atol=0.05, check_dtype=False)
    assert model.seen == [torch.float32] * 2 + [model.linear.weight.dtype] * 2


def test_copies_pickles_and_replicas_run_their_own_weights(amp) -> None:
    model = Doubling()
    amp.initialize(model, opt_level="O3", verbosity=0)
    replica = model._replicate_for_data_parallel()
    replica.linear = model.linear._replicate_for_data_parallel()
    replica.linear.weight = torch.zeros(2, 2).half()
    replica.linear.bias = torch.zeros(2).half()
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        nn.init.zeros_(other.linear.weight)
        nn.init.zeros_(other.linear.bias)
    for other in (replica, copied, loaded):
        assert not other(torch.ones(1, 2)).any()
        assert not other.forward(torch.ones(1, 2).half()).any() or other is replica
    assert model(torch.ones(1, 2)).any()


def test_a_copy_with_all_attributes_of_its_original_runs_its_own_weights(amp) -> None:
    """As the averages of YOLO's trainers get them, by ``copy_attr(ema, model)``."""
    model = Doubling()
    amp.initialize(model, opt_level="O2", verbosity=0)
    copied = copy.deepcopy(model)
    for name, value in vars(model).items():
        if not name.startswith("_"):
            setattr(copied, name, value)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert not copied(torch.ones(1, 2)).any()
    assert model(torch.ones(1, 2)).any()


def test_cloudpickle_and_dill_take_along_the_forward_that_casts(amp) -> None:
    """They save the function, where pickle saves a name. Joblib and mlflow use cloudpickle."""
    model = Doubling()
    amp.initialize(model, opt_level="O3", verbosity=0)
    function = model.forward.__func__
    # dill saves the globals of a function by value, unless this is so.
    assert vars(sys.modules[function.__module__]) is function.__globals__
    loaded = cloudpickle.loads(cloudpickle.dumps(model))
    expected = model(torch.ones(1, 2))
    assert torch.equal(loaded(torch.ones(1, 2)), expected)
    assert torch.equal(loaded.forward(torch.ones(1, 2)), expected)
    amp.initialize(loaded.float(), opt_level="O3", verbosity=0)
    assert torch.equal(loaded(torch.ones(1, 2)), expected)


def test_models_and_optimizers_that_a_script_drops_are_freed(amp) -> None:
    """apex kept every model that it had ever initialized."""
    for level in LEVELS:
        model, optimizer = trained(amp, level)
        dropped = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [reference() for reference in dropped] == [None, None]


def test_models_that_call_each_other_in_hooks_run(amp) -> None:
    outer, inner = Doubling(), Doubling()
    amp.initialize([outer, inner], opt_level="O3", verbosity=0)
    outer.register_forward_pre_hook(lambda module, args: (inner.forward(args[0]).half(),))
    expected = outer.linear(2 * inner.linear(torch.ones(1, 2).half())) * 2
    assert torch.equal(outer.forward(torch.ones(1, 2)), expected.float())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_forward_that_a_script_replaced_keeps_nothing(apex, amp, level: str) -> None:
    model, optimizer = trained(amp, level)
    model.forward = types.MethodType(lambda self, x: self[0](x).relu(), model)
    for _ in range(3):
        assert model(torch.ones(1, 4)).dtype is torch.float32
    begun = apex.amp.frontend.cast_direct_calls.__globals__["_calls"].begun
    assert len([one for one in begun if one() is model]) <= 1  # others may be of other tests
    other = Doubling()
    amp.initialize(other, opt_level=level, verbosity=0)
    assert other.forward(torch.ones(1, 2)).dtype is torch.float32
    dropped = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert dropped() is None


def test_a_model_with_a_forward_of_its_own_and_one_that_is_compiled_run(amp) -> None:
    model = Doubling()
    model.forward = lambda x: model.linear(x)
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model.forward(torch.ones(1, 2)).dtype is torch.float32
    other = Doubling()
    amp.initialize(other, opt_level="O2", verbosity=0)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), other(torch.ones(1, 2)))


@pytest.mark.parametrize(
    "made",
    [
        lambda model: types.MethodType(Doubling.forward, model),
        lambda model: functools.partial(Doubling.forward, model),
        lambda model: lambda x: Doubling.forward(model, x),
    ],
)
def test_a_forward_of_its_own_is_put_back_and_keeps_no_model(amp, made) -> None:
    model = Doubling()
    own = model.forward = made(model)
    amp.initialize(model, opt_level="O3", verbosity=0)
    assert model.forward(torch.ones(1, 2)).dtype is torch.float32
    assert model.seen == [torch.float16]
    amp_patch.amp.deactivate()
    assert vars(model)["forward"] is own
    for _ in range(2):
        amp.initialize(model, opt_level="O0", verbosity=0)
    model.forward(torch.ones(1, 2).half())
    assert model.seen == [torch.float16, torch.float32]
    theirs = model.forward = lambda x: x  # a script's own, which stays
    amp_patch.amp.deactivate()
    assert vars(model)["forward"] is theirs
    model.forward = own
    amp.initialize(model, opt_level="O3", verbosity=0)
    dropped = weakref.ref(model)
    del model, own
    gc.collect()
    assert dropped() is None


def test_a_copy_that_is_initialized_itself_casts_once(amp) -> None:
    model = Doubling()
    amp.initialize(model, opt_level="O3", verbosity=0)
    copied = copy.deepcopy(model).float()
    amp.initialize(copied, opt_level="O3", verbosity=0)
    before = len(copied.seen)
    assert copied.forward(torch.ones(1, 2)).dtype is torch.float32
    assert copied.seen[before:] == [torch.float16]
    assert vars(copied)["forward"].__func__ is vars(model)["forward"].__func__


# -- casts -----------------------------------------------------------------------------------------


@pytest.fixture
def handle(amp):
    return amp.init()


def test_after_init_every_function_casts(handle) -> None:
    x = torch.randn(3, 4)
    assert F.linear(x, torch.randn(2, 4)).dtype is torch.float16
    assert (x @ x.t()).dtype is torch.float16
    assert nn.Linear(4, 2)(x).dtype is torch.float16
    assert F.softmax(x.half(), -1).dtype is torch.float32
    assert F.relu(x.half()).dtype is torch.float16
    assert torch.cat([x, x.half()]).dtype is torch.float32
    handle._deactivate()
    assert not handle.is_active()
    assert F.linear(x, torch.randn(2, 4)).dtype is torch.float32


def test_after_init_casts_act_on_every_device(handle) -> None:
    x = torch.empty(3, 4, device="meta")
    assert F.linear(x, torch.empty(2, 4, device="meta")).dtype is torch.float16


def test_init_for_bfloat16_in_roms_order(amp) -> None:
    amp.init(True, "dynamic", torch.bfloat16)
    assert nn.Linear(4, 2)(torch.randn(3, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["wrap_optimizer", "scale_loss"])
def test_functions_go_on_casting_to_the_dtype_of_init(amp, dtype, way: str) -> None:
    handle = amp.init(patch_type=dtype)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "wrap_optimizer":
        block = handle.wrap_optimizer(optimizer).scale_loss(model(x).float().sum())
    else:
        block = handle.scale_loss(model(x).float().sum(), optimizer)
    with block as scaled_loss:
        assert model(x).dtype is dtype
        scaled_loss.backward()
    assert model(x).dtype is dtype


def test_a_handle_is_not_active_once_all_is_restored(handle) -> None:
    assert handle.is_active()
    amp_patch.amp.deactivate()
    assert not handle.is_active()


@pytest.mark.parametrize("way", ["disable_casts", "handle", "core"])
def test_a_handle_is_not_active_where_casts_are_disabled(amp, way: str) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    handle, x = amp._amp_state.handle, torch.ones(2, 2)
    off = {
        "disable_casts": amp.disable_casts,
        "handle": handle._disable_casts,
        "core": amp_patch.amp.disable_casts,
    }[way]
    with off():
        assert (handle.is_active(), handle._is_active, (x @ x).dtype) == (False, False, x.dtype)
        with amp_patch.amp.half_region():
            assert (handle.is_active(), (x @ x).dtype) == (True, torch.float16)
    assert (handle.is_active(), handle._is_active) == (True, True)


def test_a_script_may_set_whether_a_handle_is_active(handle) -> None:
    handle._is_active = False
    assert not handle.is_active()
    handle._is_active = True
    assert handle.is_active()


def test_what_a_script_sets_and_sets_back_where_casts_are_disabled_does_not_last(handle) -> None:
    with handle._disable_casts():
        before = handle._is_active
        handle._is_active = False
        handle._is_active = before
    assert handle.is_active()


def test_a_wrapped_optimizer_scales_losses_where_casts_are_disabled(handle) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.5))
    with handle._disable_casts():
        with optimizer.scale_loss((2 * weight).sum()) as scaled_loss:
            assert scaled_loss.item() == 6 * 2.0**16
            scaled_loss.backward()
        optimizer.step()
    assert torch.equal(weight, torch.zeros(3))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_after_init_recurrent_layers_run_in_half(handle, kind, dtype) -> None:
    layer = kind(4, 5, num_layers=2, bidirectional=True)
    x = torch.randn(3, 2, 4, dtype=dtype, requires_grad=True)
    output, _ = layer(x)
    assert output.dtype is torch.float16
    output.float().sum().backward()
    assert x.grad.dtype is dtype
    assert layer.weight_ih_l0.grad.dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_recurrent_layers_whose_weights_lie_apart_train(amp, level: str) -> None:
    """apex took them for parts of one memory, and failed with "invalid storage offset"."""
    layer = nn.LSTM(4, 5)
    for name, param in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(param.detach().clone().t().contiguous().t()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    amp.initialize(layer, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    x = torch.randn(3, 2, 4)
    with amp.disable_casts():
        expected = torch.autograd.grad(layer(x)[0].sum(), layer.weight_hh_l0)[0]
    output, _ = layer(x)
    with amp.scale_loss(output.float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert output.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(layer.weight_hh_l0.grad, expected, rtol=0.05, atol=0.05)


# Of apex's fp32 list: functions that torch's autocast leaves in half.
BEYOND_TORCH = {
    "cpu": lambda x: x.cpu(),
    "ctc_loss": lambda x: F.ctc_loss(
        x.reshape(4, 1, 4), torch.ones(1, 2, dtype=torch.long), torch.tensor([4]), torch.tensor([2])
    ),
    "gelu": lambda x: F.gelu(x),
    "grid_sample": lambda x: F.grid_sample(
        x.reshape(1, 1, 4, 4), torch.zeros(1, 2, 2, 2).half(), align_corners=False
    ),
    "interpolate": lambda x: F.interpolate(x.reshape(1, 4, 4), scale_factor=2),
    "local_response_norm": lambda x: F.local_response_norm(x.reshape(1, 4, 4), 2),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, torch.ones(4, 4)),
    "normalize": lambda x: F.normalize(x),
    "softmin": lambda x: F.softmin(x, -1),
    "std": lambda x: x.std(),
    "torch.std": lambda x: torch.std(x),
    "var": lambda x: x.var(),
    "torch.var": lambda x: torch.var(x),
}


@pytest.mark.parametrize("name", BEYOND_TORCH)
def test_apexs_own_entries_hold_under_the_drop_in(amp, name: str) -> None:
    x = torch.rand(4, 4).half()
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert BEYOND_TORCH[name](x).dtype is torch.float32
    with amp.disable_casts():
        assert x.cpu().dtype is torch.float16
    amp_patch.amp.deactivate()
    assert x.cpu().dtype is torch.float16


IN_PLACE = {
    "exp_": lambda x: x.exp_(),
    "torch.exp_": lambda x: torch.exp_(x),
    "pow_": lambda x: x.pow_(2),
    "cumsum_": lambda x: x.cumsum_(0),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, torch.ones(4, 4)),
    "BCELoss": lambda x: nn.BCELoss()(x, torch.ones(4, 4)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_apex_refused_on_half_is_refused(handle, amp, name: str) -> None:
    function = IN_PLACE[name]
    with pytest.raises(NotImplementedError, match="must not run on half tensors"):
        function(torch.rand(4, 4).half())
    assert function(torch.rand(4, 4)).dtype is torch.float32
    if "pow" in name or "exp" in name:
        with amp.disable_casts():
            assert function(torch.rand(4, 4).half()).dtype is torch.float16


def test_banned_functions_run_in_fp32_where_the_script_allows_it(amp) -> None:
    amp.init(allow_banned=True)
    x = torch.rand(4, 4).half().requires_grad_()
    loss = F.binary_cross_entropy(x, torch.ones(4, 4).half())
    loss.backward()
    assert (loss.dtype, x.grad.dtype) == (torch.float32, torch.float16)


def test_lists_that_a_script_changes_are_followed(apex, amp, monkeypatch) -> None:
    lists = amp.lists.functional_overrides
    changed = [name for name in lists.FP32_FUNCS if name != "softmax"]
    monkeypatch.setattr(lists, "FP32_FUNCS", [*changed, "relu"])
    monkeypatch.setattr(lists, "FP16_FUNCS", [*lists.FP16_FUNCS, "softsign"])
    monkeypatch.setattr(lists, "BANNED_FUNCS", [])
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    x = torch.randn(3, 3)
    assert F.softmax(x.half(), -1).dtype is torch.float16
    assert F.relu(x.half()).dtype is torch.float32
    assert F.softsign(x).dtype is torch.float16


def test_weights_used_twice_train(amp) -> None:
    """apex's cache failed on these with an IndexError since torch 1.10."""
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    x = torch.randn(2, 3)
    weight = model.weight.detach().clone().requires_grad_()
    (x @ weight.t() @ weight.t()).sum().backward()
    with amp.scale_loss(model(model(x)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
@pytest.mark.parametrize("level", LEVELS)
def test_zero_grad_takes_torchs_arguments(amp, level: str, arguments) -> None:
    model, optimizer = trained(amp, level)
    backward(amp, model, optimizer)
    optimizer.zero_grad(**arguments)
    for param in (*model.parameters(), *amp.master_params(optimizer)):
        assert param.grad is None or not param.grad.any()


def test_attention_with_mixed_dtypes_runs(amp) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    q, k = torch.randn(1, 2, 4), torch.randn(1, 2, 4).half()
    assert F.scaled_dot_product_attention(q, k, k).dtype is torch.float16


def test_models_are_traced_scripted_and_compiled(amp) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates all of TorchScript
        traced = torch.jit.trace(model[0], x, check_trace=False)
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert traced(x).dtype is torch.float16
    assert scripted(torch.randn(1, 2)).shape == (1, 2)
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    assert compiled(x).dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_model_is_scripted_as_if_nothing_were_there(amp, level) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    amp.initialize(model, opt_level=level, verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates all of TorchScript
        scripted = torch.jit.script(model)
    x = torch.randn(2, 3)
    dtype = model[0].weight.dtype
    expected = torch.ops.aten.linear(x.to(dtype), model[0].weight, model[0].bias).relu()
    assert torch.equal(scripted(x.to(dtype)), expected)
    assert model.forward(x).dtype is model(x).dtype  # the model's own is there again


# -- the older interface ---------------------------------------------------------------------------


def test_wrapped_optimizers_train_as_without_amp(handle, capsys) -> None:
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 2), nn.Linear(4, 2)
    model.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    x = torch.randn(8, 4)
    skipped = 0
    for _ in range(12):
        optimizer.zero_grad()
        for target in (0.0, 1.0):
            loss = (model(x).float() - target).pow(2).mean()
            with optimizer.scale_loss(loss) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        if "Gradient overflow, skipping update" in capsys.readouterr().out:
            skipped += 1
            continue
        reference.zero_grad()
        with handle._disable_casts():
            sum((plain(x) - target).pow(2).mean() for target in (0.0, 1.0)).backward()
        reference.step()
    assert skipped < 4
    torch.testing.assert_close(model.weight, plain.weight, rtol=2e-2, atol=2e-3)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_handle_scales_losses(handle) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with handle._disable_casts():
        (expected,) = torch.autograd.grad(model(x).mean(), model.weight)
    with handle.scale_loss(model(x).float().mean(), optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(2.0**16 * model(x).float().mean().item(), 1e-2)
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-2, atol=1e-3)


def test_a_handle_that_is_disabled_does_nothing(amp) -> None:
    handle = amp.init(enabled=False)
    model = nn.Linear(4, 2)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.randn(2, 4)).mean()
    assert loss.dtype is torch.float32
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)


def test_a_weight_written_behind_torchs_back_is_cast_anew_when_a_script_says_so(amp) -> None:
    model = nn.Linear(2, 2, bias=False)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(1, 2)
    with torch.no_grad():
        model(x)
        model.weight.data.zero_()
        amp._amp_state.handle._clear_cache()
        assert not model(x).any()


# -- decorators, and what is printed ---------------------------------------------------------------


def test_functions_of_the_scripts_own_cast(amp) -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    x = torch.randn(2)
    assert amp.half_function(lambda value: value)(x).dtype is torch.float16
    assert amp.float_function(lambda value: value)(x.half()).dtype is torch.float32
    assert amp.promote_function(lambda a, b: b)(x, x.half()).dtype is torch.float32


def test_functions_that_a_script_sets_are_put_back(amp) -> None:
    """By apex.amp.utils.set_func, and by apex.amp.wrap over it; a dict stays the script's."""
    module, names = types.ModuleType("module"), {"double": lambda x: 2 * x}
    original = module.double = lambda x: 2 * x
    trained(amp, "O1")
    amp.utils.set_func(module, "double", abs)
    assert amp.utils.get_func(module, "double") is abs
    amp.utils.set_func(module, "double", original)
    amp.wrap.cached_cast(module, "double", amp.utils.maybe_half, amp._amp_state.handle)
    amp.wrap.cached_cast(names, "double", amp.utils.maybe_half, amp._amp_state.handle)
    for double in (module.double, names["double"]):
        assert double(torch.ones(1)).dtype is torch.float16
    amp_patch.amp.deactivate()
    assert module.double is original
    assert names["double"] is not original


def test_messages_are_printed_by_verbosity_alone(amp, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained(amp, "O2", verbosity=1)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master "
        "weights.\n\nDefaults for this optimization level are:\n"
        "enabled                : True\nopt_level              : O2\n"
    )
    backward(amp, model, optimizer, value=float("inf"))
    optimizer.step()
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0; "
        "not finite: 0.weight (NaN), 0.bias (NaN), 1.weight (NaN) and 3 more\n"
    )
    amp._amp_state.verbosity = 0
    optimizer.zero_grad()
    backward(amp, model, optimizer, value=float("inf"))
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_at_verbosity_2_every_cast_is_printed(amp, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2, bias=False)
    amp.initialize(model, opt_level="O1", verbosity=2)
    capsys.readouterr()
    F.softmax(model(torch.ones(1, 2)), -1)
    assert capsys.readouterr().out.splitlines() == [
        *["Float->Half (linear)"] * 2,  # the input and the weight
        "Half->Float (softmax)",
    ]
    with amp.disable_casts():
        model(torch.ones(1, 2))
    assert capsys.readouterr().out == ""
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    model(torch.ones(1, 2))
    assert capsys.readouterr().out == ""
    amp_patch.amp.deactivate()
    amp.init(verbose=True)
    nn.Linear(2, 2, bias=False)(torch.ones(1, 2).half())
    assert capsys.readouterr().out == "Float->Half (linear)\n"


def test_a_handle_goes_on_printing_every_cast(amp, capsys: pytest.CaptureFixture[str]) -> None:
    handle = amp.init(verbose=True)
    layer = nn.Linear(2, 2, bias=False)
    handle.wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    layer(torch.ones(1, 2).half())
    assert capsys.readouterr().out == "Float->Half (linear)\n"


def test_helpers_of_the_state_print_by_verbosity_and_raise_by_hard_override(amp, capsys) -> None:
    trained(amp)
    amp._amp_state.verbosity = 1
    amp._amp_state.maybe_print("seen")
    amp._amp_state.verbosity = 0
    amp._amp_state.maybe_print("unseen")
    assert capsys.readouterr().out == "seen\n"
    with pytest.raises(RuntimeError, match="refused"):
        amp._amp_state.warn_or_err("refused")


def test_deprecated_helpers_answer(amp) -> None:
    compat, utils = amp.compat, amp.utils
    assert compat.is_tensor_like(torch.ones(1))
    assert compat.scalar_python_val(torch.tensor([2.0])) == 2.0
    assert utils.type_string(torch.ones(1).half()) == "HalfTensor"
    assert utils.is_nested([1])
    assert utils.is_fp_tensor([torch.ones(1)])
    assert utils.collect_fp_tensor_types([torch.ones(1), [torch.ones(1).half()]], {}) == {
        "FloatTensor",
        "HalfTensor",
    }
    assert utils.as_inplace(["exp"]) == ["exp_"]
    assert utils.maybe_half([torch.ones(1), 1])[0].dtype is torch.float16
    assert utils.maybe_float(torch.ones(1).half()).dtype is torch.float32
    assert amp.rnn_compat.has_old_rnns() is False
