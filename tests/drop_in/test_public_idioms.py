"""What public training code does with apex beyond its documented use."""

from __future__ import annotations

import importlib
import inspect
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def test_contrib_optimizers_are_there_after_import_apex(apex: types.ModuleType) -> None:
    """OpenNMT-py: ``import apex; apex.contrib.optimizers.FP16_Optimizer``."""
    assert apex.contrib.optimizers.FP16_Optimizer.__module__.endswith(".fp16_optimizer")


def test_applier_reaches_tensors_in_containers_and_batches(apex: types.ModuleType) -> None:
    """Catalyst casts the inputs and outputs of its DataParallel with it."""

    class Batch:
        def to(self, dtype: torch.dtype) -> str:
            return f"batch in {dtype}"

    given = (torch.ones(2), {"a": [torch.ones(1), "text"]}, Batch(), None, 3)
    result = apex.amp._initialize.applier(OrderedDict(all=given), lambda x: x.to(torch.float16))
    first, second, third, *rest = result["all"]
    assert first.dtype is second["a"][0].dtype is torch.float16
    assert second["a"][1] == "text"
    assert third == "batch in torch.float16"
    assert rest == [None, 3]


def test_initialize_tells_its_defaults(apex: types.ModuleType, amp: types.ModuleType) -> None:
    """Catalyst passes them all, but those that a user gives."""
    spec = inspect.getfullargspec(apex.amp.initialize)
    options = dict(zip(spec.args[-len(spec.defaults) :], spec.defaults, strict=True))
    del options["optimizers"]
    assert (options["opt_level"], options["max_loss_scale"]) == ("O1", 2.0**24)
    model = apex.amp.initialize(nn.Linear(4, 2), **{**options, "opt_level": "O2", "verbosity": 0})
    assert model.weight.dtype is torch.float16


@pytest.mark.parametrize(
    "function",
    [
        "normalization.fused_layer_norm.FusedLayerNormAffineFunction",
        "normalization.fused_layer_norm.FusedRMSNormAffineFunction",
        "contrib.layer_norm.layer_norm.FastLayerNormFN",
    ],
)
def test_norm_functions_tell_their_arguments(apex: types.ModuleType, function: str) -> None:
    """Megatron looks whether their forward takes memory_efficient before it calls apply."""
    module, _, name = function.rpartition(".")
    kind = getattr(importlib.import_module(f"apex.{module}"), name)
    assert "memory_efficient" in inspect.getfullargspec(kind.forward).args


class Copy:
    """An optimizer of Lightning: what is in another one, in a class made for it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {name: x for name, x in vars(optimizer).items() if name != "step"}
        self.__class__ = type("Copy", (Copy, type(optimizer)), {})
        self.inside = optimizer

    def step(self) -> None:
        self.inside.step()


class Wrapper:
    """An optimizer of the kind that Colossal-AI, Accelerate and ESPnet put around torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inside = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inside.param_groups

    def step(self) -> None:
        self.inside.step()


@pytest.mark.parametrize("around", [Copy, Wrapper])
@pytest.mark.parametrize("in_list", [False, True])
def test_scale_loss_knows_the_optimizer_in_another(
    apex: types.ModuleType, amp: types.ModuleType, around: Any, in_list: bool
) -> None:
    weights = []
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    for wrap in (lambda optimizer: optimizer, around):
        torch.manual_seed(1)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        optimizer = wrap(optimizer)
        for _ in range(3):
            loss = model(inputs).square().mean()
            given = [optimizer] if in_list else optimizer
            with apex.amp.scale_loss(loss, given) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(list(apex.amp.master_params(optimizer)), 0.5)
            optimizer.step()
            model.zero_grad()
        weights.append(model.state_dict()["weight"])
    torch.manual_seed(1)
    assert not torch.equal(weights[0], nn.Linear(8, 4).weight)
    assert torch.equal(*weights)


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_init_after_initialize_casts_inside_of_a_half_model(
    apex: types.ModuleType, amp: types.ModuleType, opt_level: str
) -> None:
    """ESPnet does both, for a CTC loss of its model that half has no kernel for."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def loss_fn(self, scores: torch.Tensor) -> torch.Tensor:
            self.dtype = scores.dtype
            lengths = torch.full((4,), 6), torch.full((4,), 3)
            return nn.functional.ctc_loss(scores.log_softmax(2), targets, *lengths)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.loss_fn(self.layer(inputs).transpose(0, 1))

    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 6, 8), torch.randint(1, 5, (4, 3))
    model = Model()
    in_fp32 = model(inputs).item()
    optimizer = torch.optim.Adadelta(model.parameters())
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    apex.amp.register_float_function(Model, "loss_fn")
    apex.amp.init()
    with apex.amp.scale_loss(model(inputs), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.dtype is torch.float32
    assert model.layer.weight.dtype is torch.float16
    assert model(inputs).item() < in_fp32


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_model_is_traced_with_its_casts(apex: types.ModuleType, amp: types.ModuleType) -> None:
    """Catalyst initializes a model without an optimizer to trace it, twice to compare."""
    model = apex.amp.initialize(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    inputs = torch.randn(3, 8)
    traced = torch.jit.trace(model.eval(), inputs)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert traced(inputs).dtype is torch.float16
    assert torch.equal(traced(inputs), model(inputs))


@pytest.mark.parametrize(
    ("owner", "name", "mend"),
    [
        (
            nn,
            "ReLU6",
            r"Call amp.register_{}_function\(torch.nn.modules.activation.ReLU6, 'forward'",
        ),
        (nn, "Parameter", "Leave it out."),
    ],
)
@pytest.mark.parametrize("rule", ["half", "float", "promote", "bfloat16"])
def test_a_class_that_is_registered_stays_a_class(
    apex: types.ModuleType, amp: types.ModuleType, rule: str, owner: Any, name: str, mend: str
) -> None:
    """Public scripts name layers, which apex took: their arguments are numbers."""
    kind, inputs = getattr(owner, name), torch.randn(3, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU6())
    apex.amp.initialize(model, opt_level="O1", verbosity=0)
    expected = model(inputs)
    with pytest.warns(UserWarning, match=mend.format(rule)):
        getattr(apex.amp, f"register_{rule}_function")(owner, name)
    assert getattr(owner, name) is kind
    assert torch.equal(model(inputs), expected)
    assert model(inputs).dtype is torch.float16


def test_the_call_that_is_advised_for_a_class_casts_what_its_layers_get(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU6())
    apex.amp.register_float_function(torch.nn.modules.activation.ReLU6, "forward")
    apex.amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.randn(3, 4)).dtype is torch.float32


def test_a_first_call_may_leave_the_number_of_losses_to_a_later_one(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    """Colossal-AI's comparisons initialize the model and its optimizer by two calls."""
    model = apex.amp.initialize(nn.Linear(4, 2), opt_level="O2", num_losses=0, verbosity=0)
    assert apex.amp._amp_state.loss_scalers == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apex.amp.initialize(nn.Identity(), optimizer, opt_level="O2", num_losses=2, verbosity=0)
    assert len(apex.amp._amp_state.loss_scalers) == 2
    before = model.state_dict()["weight"].clone()
    loss = model(torch.ones(3, 4)).sum() / 1024
    with apex.amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict()["weight"], before - 0.1 * 3 / 1024)


def plain_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("enabled", [None, "", 0, [], torch.tensor(False)], ids=repr)
def test_enabled_may_be_anything_that_is_false(
    apex: types.ModuleType, amp: types.ModuleType, enabled: Any
) -> None:
    model, optimizer = plain_model()
    assert apex.amp.initialize(model, optimizer, enabled=enabled) == (model, optimizer)
    loss = model(torch.ones(3, 4)).sum()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss


@pytest.mark.parametrize("enabled", ["O1", 2, torch.tensor(True)], ids=repr)
def test_enabled_may_be_anything_that_is_true(
    apex: types.ModuleType, amp: types.ModuleType, enabled: Any
) -> None:
    """MadryLab's robustness, and who copied it, write ``initialize(model, optimizer, "O1")``."""
    model, optimizer = apex.amp.initialize(*plain_model(), enabled, verbosity=0)
    assert model(torch.ones(3, 4)).dtype is torch.float16
    with apex.amp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled_loss:
        assert scaled_loss.item() == 65536 * model(torch.ones(3, 4)).sum().item()


def test_the_name_of_another_level_is_not_taken_for_true(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    """apex trained at O1, where the script says O2."""
    model, optimizer = plain_model()
    for given, mend in (("O2", "opt_level='O2'"), ("False", "enabled=False")):
        with pytest.raises(TypeError, match=f"got .*{given}.*{mend}"):
            apex.amp.initialize(model, optimizer, given, verbosity=0)
    model = apex.amp.initialize(model, enabled="O2", opt_level="O2", verbosity=0)
    assert model.weight.dtype is torch.float16


def test_a_floor_of_0_is_none(apex: types.ModuleType, amp: types.ModuleType) -> None:
    apex.amp.initialize(*plain_model(), min_loss_scale=0, verbosity=0)
    given = apex.amp.scaler.LossScaler("dynamic", min_loss_scale=0.0)
    (used,) = apex.amp._amp_state.loss_scalers
    assert used._min_loss_scale == given._min_loss_scale == 2.0**-24


def test_optimizers_may_be_the_values_of_a_dict(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizers = {str(one): torch.optim.SGD(one.parameters(), lr=0.1) for one in model}
    before = model[0].weight.detach().clone()
    apex.amp.initialize(model, [*optimizers.values()], opt_level="O2", verbosity=0)
    loss = model(torch.ones(3, 4)).sum() / 1024
    with apex.amp.scale_loss(loss, optimizers.values()) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    expected = before - 0.1 * 3 / 1024 * model[1].weight.float().sum(0)[:, None]
    torch.testing.assert_close(model.state_dict()["0.weight"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("in_list", [False, True])
def test_a_script_switches_amp_off_by_properties_of_its_own(
    apex: types.ModuleType, amp: types.ModuleType, monkeypatch: pytest.MonkeyPatch, in_list: bool
) -> None:
    """Habana's fork of an example does, and calls no initialize(); one that did goes on."""
    state, (model, optimizer) = apex.amp._amp_state, plain_model()
    prepared = plain_model()
    apex.amp.initialize(*prepared, opt_level="O1", verbosity=0)
    monkeypatch.setattr(state, "opt_properties", apex.amp.frontend.Properties(), raising=False)
    state.opt_properties.enabled = False
    for one, other, is_scaled in ((model, optimizer, False), (*prepared, True)):
        loss = one(torch.ones(3, 4)).float().sum()
        given = [other] if in_list else other
        with apex.amp.scale_loss(loss, given) as scaled_loss:
            assert (scaled_loss is not loss) == is_scaled
            scaled_loss.backward()
    amp.deactivate()


def test_a_handle_is_found_after_it_was_deactivated(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    """ATorch deactivates it between strategies, also after O2, which makes none of its own."""
    state = apex.amp._amp_state
    for opt_level in ("O1", "O2", "O1"):
        model, optimizer = apex.amp.initialize(*plain_model(), opt_level=opt_level, verbosity=0)
        with apex.amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        state.handle._deactivate()
        assert not state.handle.is_active()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    amp.deactivate()
    assert not hasattr(state, "handle")


def test_python_fallbacks_scale_add_and_find_overflows(apex: types.ModuleType) -> None:
    """fairseq's and others' copies of the optimizers call them where there are no kernels."""
    half, stashed, master = torch.tensor([8.0, 2.0]).half(), torch.ones(2), torch.zeros(2)
    assert apex.amp.scaler.scale_check_overflow_python(half, master, 1 / 4, True) is False
    assert master.tolist() == [2.0, 0.5]
    axpby = apex.amp.scaler.axpby_check_overflow_python
    assert axpby(half, stashed, master, 0.5, 3.0, True) is False
    assert master.tolist() == [7.0, 4.0]
    for value in (float("inf"), float("nan")):
        half[1] = value
        assert apex.amp.scaler.scale_check_overflow_python(half, master, 1.0, True) is True
        assert axpby(half, stashed, master, 1.0, 1.0, True) is True
        assert master.tolist() == [7.0, 4.0]
    assert apex.amp.scaler.scale_check_overflow_python(half, master, 1.0) is False
    assert master[1].isnan()


@pytest.mark.parametrize("scale_is_second", [True, False])
def test_a_gradient_penalty_is_unscaled_by_a_python_fallback(
    apex: types.ModuleType, scale_is_second: bool
) -> None:
    """DeepPrivacy does, by the order of arguments that it had in spring 2019."""
    weight, x = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    unscale = apex.amp.scaler.scale_check_overflow_python
    grad = torch.autograd.grad(1024.0 * weight * x**2, x, create_graph=True)[0]
    assert unscale(*(grad, 1 / 1024, grad) if scale_is_second else (grad, grad, 1 / 1024)) is False
    assert grad.item() == 12.0
    grad.square().backward()  # (2 w x) ** 2
    assert weight.grad.item() == 96.0
    overflow = torch.tensor([float("inf")])
    assert unscale(overflow, 1 / 1024, overflow) is True


@pytest.mark.parametrize("override", [None, (8.0, 4.0, 2.0)])
def test_gradients_of_masters_are_unscaled_and_added_to_earlier_ones(
    apex: types.ModuleType, override: Any
) -> None:
    scaler = apex.amp.scaler.LossScaler("dynamic", init_scale=16.0)
    params = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    new, stashed = [32.0, 64.0, None, None], [None, 3.0, 5.0, None]
    for param, value in zip(params, new, strict=True):
        param.grad = None if value is None else torch.full((2,), value)
    grads = [None if value is None else torch.full((2,), value) for value in stashed]
    own = apex.amp._process_optimizer.post_backward_models_are_masters
    own(scaler, params, grads, override)
    found = [None if param.grad is None else param.grad[0].item() for param in params]
    unscaled = [2.0, 7.0] if override is None else [8.0, 17.5]
    assert found == [*unscaled, 5.0, None]
    assert grads == [None] * 4
    assert scaler._overflow_buf.item() == 0
    params[0].grad.fill_(float("inf"))
    own(scaler, params, grads)
    assert scaler._overflow_buf.item() == 1


def test_a_hook_of_a_state_dict_is_found_by_its_class(
    apex: types.ModuleType, amp: types.ModuleType
) -> None:
    hook = apex.amp._initialize.O2StateDictHook(None)
    model, _ = plain_model()
    handle = model.half()._register_state_dict_hook(hook)
    model.register_buffer("count", torch.tensor(3))
    saved = model.state_dict()
    assert (saved["weight"].dtype, saved["count"].dtype) == (torch.float32, torch.int64)
    handle.remove()
    model = apex.amp.initialize(plain_model()[0], opt_level="O2", verbosity=0)
    hooks = model._state_dict_hooks.values()
    assert not any(isinstance(one, type(hook)) for one in hooks)


def test_arguments_are_cast_by_autocast_on_a_gpu_alone(apex: types.ModuleType) -> None:
    cast = importlib.import_module("apex._autocast_utils")._cast_if_autocast_enabled
    with FakeTensorMode():
        on_gpu = torch.empty(2, device="cuda")
        given = on_gpu, [on_gpu.double()], torch.empty(2), on_gpu.int(), None
        assert all(a is b for a, b in zip(cast(*given), given, strict=True))
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        try:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            first, (second,), *rest, nothing = cast(*given)
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
    found = [tensor.dtype for tensor in (first, second, *rest)]
    assert found == [torch.bfloat16, torch.float64, torch.float32, torch.int32]
    assert nothing is None
