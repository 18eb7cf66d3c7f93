"""apex.optimizers: formulas in float64, apex's defaults and state, torch's own, every level."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import required

from amp_patch import amp
from amp_patch.optimizers.device_flag import skips_by_flag, step_by_flag

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHARES_APEX = True
ONE_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = [(), (4,), (3, 5)]
NAMES = ["FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad"]
NAMES += ["FusedMixedPrecisionLamb"]


@pytest.fixture
def optimizers(apex: types.ModuleType) -> Any:
    return importlib.import_module("apex.optimizers")


@pytest.fixture
def contrib(apex: types.ModuleType) -> Any:
    return importlib.import_module("apex.contrib.optimizers")


def make(optimizers: Any, name: str, params: Any, **options: Any) -> Any:
    if name == "FusedSGD":
        options = {"lr": 0.125, "momentum": 0.5, **options}
    return getattr(optimizers, name)(params, **options)


def parameters(seed: int = 0, dtype: torch.dtype = F64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, dtype=F64) for shape in SHAPES]
    return [nn.Parameter(value.to(dtype)) for value in drawn]


def give_gradients(params: list[nn.Parameter], seed: int, missing: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, dtype=F64).to(param.dtype)
        param.grad = None if index == missing else grad


def near(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            ours.detach().double(), theirs.detach().double(), rtol=tolerance, atol=tolerance
        )


class Reference:
    """An optimizer in float64, a tensor at a time; the group counts the steps, as in apex."""

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        self.params = [param.detach().double().clone() for param in params]
        self.first = [torch.zeros_like(param) for param in self.params]
        self.second: list[Any] = [torch.zeros_like(param) for param in self.params]
        self.known = [False] * len(params)
        self.options, self.count = options, 0

    def step(self, grads: list[Tensor | None]) -> None:
        self.count += 1
        exact = [None if grad is None else grad.double() for grad in grads]
        for i, grad in enumerate(self.prepared(exact)):
            if grad is not None:
                self.step_one(i, grad)
                self.known[i] = True

    def prepared(self, grads: list[Any]) -> list[Any]:
        return grads

    def step_one(self, i: int, grad: Tensor) -> None:
        raise NotImplementedError

    def corrections(self) -> tuple[float, float]:
        beta1, beta2 = self.options["betas"]
        if not self.options["bias_correction"]:
            return 1.0, 1.0
        return 1 - beta1**self.count, 1 - beta2**self.count


class Adam(Reference):
    """Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2."""

    def update(self, i: int, grad: Tensor, share: float) -> Tensor:
        o, (beta1, beta2), (c1, c2) = self.options, self.options["betas"], self.corrections()
        if not o["adam_w_mode"]:
            grad = grad + o["weight_decay"] * self.params[i]
        self.first[i] = beta1 * self.first[i] + share * grad
        self.second[i] = beta2 * self.second[i] + (1 - beta2) * grad**2
        update = (self.first[i] / c1) / ((self.second[i] / c2).sqrt() + o["eps"])
        return update + o["weight_decay"] * self.params[i] * o["adam_w_mode"]

    def step_one(self, i: int, grad: Tensor) -> None:
        update = self.update(i, grad, 1 - self.options["betas"][0])
        self.params[i] = self.params[i] - self.options["lr"] * update


class Lamb(Adam):
    """You et al. 2020, algorithm 2."""

    def prepared(self, grads: list[Any]) -> list[Any]:
        norm = sum(g.square().sum().item() for g in grads if g is not None) ** 0.5
        limit = self.options["max_grad_norm"]
        factor = limit / norm if limit and norm > limit else 1.0
        return [None if grad is None else grad * factor for grad in grads]

    def step_one(self, i: int, grad: Tensor) -> None:
        o = self.options
        update = self.update(i, grad, 1 - o["betas"][0] if o["grad_averaging"] else 1.0)
        ratio = 1.0
        if o["weight_decay"] or o["use_nvlamb"]:
            norms = self.params[i].norm().item(), update.norm().item()
            ratio = 1.0 if 0.0 in norms else norms[0] / norms[1]
        self.params[i] = self.params[i] - o["lr"] * ratio * update


class NovoGrad(Reference):
    """Ginsburg et al. 2019, algorithm 1; the norm is averaged with itself at the first step."""

    def step_one(self, i: int, grad: Tensor) -> None:
        o, (beta1, beta2), (c1, c2) = self.options, self.options["betas"], self.corrections()
        norm = grad.abs().max() if o["norm_type"] == 0 else grad.square().sum().sqrt()
        before = self.second[i] if self.known[i] else norm * (not o["init_zero"])
        if o["norm_type"] == 0:
            self.second[i] = beta2 * before + (1 - beta2) * norm
        else:
            self.second[i] = (beta2 * before**2 + (1 - beta2) * norm**2).sqrt()
        divisor = self.second[i] / c2**0.5 + o["eps"]
        if o["reg_inside_moment"]:
            grad = grad / divisor + o["weight_decay"] * self.params[i]
        share = 1 - beta1 if o["grad_averaging"] else 1.0
        self.first[i] = beta1 * self.first[i] + share * grad
        update = self.first[i] / c1
        if not o["reg_inside_moment"]:
            update = update / divisor + o["weight_decay"] * self.params[i]
        self.params[i] = self.params[i] - o["lr"] * update


class Sgd(Reference):
    """As torch documents SGD, with decay where it was asked for."""

    def step_one(self, i: int, grad: Tensor) -> None:
        o = self.options
        decay = o["weight_decay"] * self.params[i]
        grad = grad if o["wd_after_momentum"] else grad + decay
        if o["momentum"]:
            moved = o["momentum"] * self.first[i] + (1 - o["dampening"]) * grad
            self.first[i] = moved if self.known[i] else grad
            grad = grad + o["momentum"] * self.first[i] if o["nesterov"] else self.first[i]
        grad = grad + decay if o["wd_after_momentum"] else grad
        self.params[i] = self.params[i] - o["lr"] * grad


class Adagrad(Reference):
    """Duchi, Hazan & Singer 2011."""

    def step_one(self, i: int, grad: Tensor) -> None:
        o = self.options
        decay = o["weight_decay"] * self.params[i]
        grad = grad if o["adagrad_w_mode"] else grad + decay
        self.first[i] = self.first[i] + grad**2
        update = grad / (self.first[i].sqrt() + o["eps"])
        self.params[i] = self.params[i] - o["lr"] * (update + decay * o["adagrad_w_mode"])


RATES = {"lr": st.sampled_from([2.0**-8, 0.25]), "weight_decay": st.sampled_from([0.0, 0.25])}
ADAM = {
    **RATES,
    "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.25)]),
    "eps": st.sampled_from([1e-6, 1e-2]),
    "bias_correction": st.booleans(),
}
AVERAGING = {"grad_averaging": st.booleans()}
OPTIONS = {
    "FusedAdam": {**ADAM, "adam_w_mode": st.booleans()},
    "FusedLAMB": {
        **ADAM,
        **AVERAGING,
        "adam_w_mode": st.booleans(),
        "max_grad_norm": st.sampled_from([1.0, 100.0, 0.0, None]),
        "use_nvlamb": st.booleans(),
    },
    "FusedNovoGrad": {
        **ADAM,
        **AVERAGING,
        "reg_inside_moment": st.booleans(),
        "norm_type": st.sampled_from([0, 2]),
        "init_zero": st.booleans(),
    },
    "FusedSGD": {
        **RATES,
        "momentum": st.sampled_from([0.0, 0.5]),
        "dampening": st.sampled_from([0.0, 0.25]),
        "wd_after_momentum": st.booleans(),
        "nesterov": st.just(False),
    },
    "FusedAdagrad": {**RATES, "eps": st.just(1e-2), "adagrad_w_mode": st.booleans()},
}
OPTIONS["FusedMixedPrecisionLamb"] = OPTIONS["FusedLAMB"]
REFERENCES: dict[str, Any] = {
    "FusedAdam": Adam,
    "FusedLAMB": Lamb,
    "FusedMixedPrecisionLamb": Lamb,
    "FusedNovoGrad": NovoGrad,
    "FusedSGD": Sgd,
    "FusedAdagrad": Adagrad,
}


@pytest.mark.parametrize("name", NAMES)
@ONE_FIXTURE
@given(data=st.data(), missing=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=2, max_size=4))
def test_steps_follow_the_formula_in_float64(
    optimizers: Any, name: str, data: st.DataObject, missing: list[int | None]
) -> None:
    options = data.draw(st.fixed_dictionaries(OPTIONS[name]))
    params = parameters()
    expected = REFERENCES[name](params, **options)
    optimizer = getattr(optimizers, name)(params, **options)
    for seed, which in enumerate(missing):
        give_gradients(params, seed, which)
        optimizer.step()
        expected.step([param.grad for param in params])
        # NovoGrad's norms are float32, whatever the parameters are.
        near(params, expected.params, 1e-4 if name == "FusedNovoGrad" else 1e-6)


@ONE_FIXTURE
@given(nesterov=st.booleans(), decay=st.sampled_from([0.0, 0.25]), momentum=st.just(0.5))
def test_sgd_is_torchs(optimizers: Any, nesterov: bool, decay: float, momentum: float) -> None:
    options = {"lr": 0.25, "momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    ours, theirs = parameters(), parameters()
    compared(ours, optimizers.FusedSGD(ours, **options), theirs, torch.optim.SGD(theirs, **options))


POWERS_OF_TWO = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.25, 0.5, 1.0]),
        "momentum": st.sampled_from([0.0, 0.125, 0.5]),
        "dampening": st.sampled_from([0.0, 0.5]),
    }
)


@ONE_FIXTURE
@given(options=POWERS_OF_TWO, dtype=st.sampled_from([F16, BF16]), seed=st.integers(0, 99))
def test_sgd_on_half_parameters_is_torchs_bit_by_bit(
    optimizers: Any, options: Any, dtype: torch.dtype, seed: int
) -> None:
    """apex rounds ``lr * update`` to half and subtracts in half, and torch rounds each of them."""
    ours, theirs = parameters(seed, dtype), parameters(seed, dtype)
    optimizer, expected = optimizers.FusedSGD(ours, **options), torch.optim.SGD(theirs, **options)
    for step in range(4):
        for params in (ours, theirs):
            give_gradients(params, 100 * seed + step)
        optimizer.step()
        expected.step()
        assert all(map(torch.equal, ours, theirs))
        for param, other in zip(ours, theirs, strict=True):
            momenta = optimizer.state[param].get("momentum_buffer")
            wanted = expected.state[other].get("momentum_buffer")
            assert (momenta is None) == (wanted is None)
            assert momenta is None or (momenta.dtype is dtype and torch.equal(momenta, wanted))


def test_momenta_of_half_parameters_load_into_their_dtype(optimizers: Any) -> None:
    """As torch loads them, so that a run goes on as one that was never saved."""
    params = parameters(0, F16)
    optimizer = optimizers.FusedSGD(params, lr=0.25, momentum=0.5)
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].float() + 1e-5
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[params[1]]["momentum_buffer"]
    assert torch.equal(loaded, saved["state"][1]["momentum_buffer"].half())


@ONE_FIXTURE
@given(adam_w=st.booleans(), decay=st.sampled_from([0.0, 0.25]))
def test_adam_is_torchs(optimizers: Any, adam_w: bool, decay: float) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = optimizers.FusedAdam(ours, adam_w_mode=adam_w, weight_decay=decay, lr=0.25)
    kind = torch.optim.AdamW if adam_w else torch.optim.Adam
    compared(ours, optimizer, theirs, kind(theirs, lr=0.25, weight_decay=decay))


def test_adagrad_is_torchs(optimizers: Any) -> None:
    ours, theirs = parameters(), parameters()
    compared(ours, optimizers.FusedAdagrad(ours), theirs, torch.optim.Adagrad(theirs))


def compared(ours: Any, optimizer: Any, theirs: Any, expected: Any) -> None:
    for seed in range(3):
        for params in (ours, theirs):
            give_gradients(params, seed)
        optimizer.step()
        expected.step()
        near(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_may_hold_every_dtype_and_is_stepped_in_float32(optimizers: Any, name: str) -> None:
    kinds = (F16, F32, BF16)
    halves = [param for dtype in kinds for param in parameters(3, dtype)]
    exact = [nn.Parameter(param.detach().float()) for param in halves]
    ours, theirs = make(optimizers, name, halves), make(optimizers, name, exact)
    for seed in range(3):
        give_gradients(halves, seed)
        for param, other in zip(halves, exact, strict=True):
            other.grad = param.grad.float()
        ours.step()
        theirs.step()
        for param, other in zip(halves, exact, strict=True):
            near([param], [other.to(param.dtype)], 2e-2)
            other.data.copy_(param)
            for key, value in ours.state[param].items():
                # torch's SGD, and apex's, keep momenta in the parameter's dtype.
                assert value.dtype is (param.dtype if name == "FusedSGD" else F32)
                near([value], [theirs.state[other][key]], 2e-2 if name == "FusedSGD" else 1e-3)


DEFAULTS = {
    "FusedAdam": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True,
        "capturable": False, "master_weights": False,
    },
    "FusedSGD": {
        "lr": required, "momentum": 0.0, "dampening": 0.0,
        "weight_decay": 0.0, "nesterov": False, "wd_after_momentum": False,
        "materialize_master_grads": True, "set_grad_none": False,
    },
    "FusedLAMB": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
        "weight_decay": 0.01, "amsgrad": False, "adam_w_mode": True, "grad_averaging": True,
        "set_grad_none": True, "max_grad_norm": 1.0, "use_nvlamb": False,
    },
    "FusedNovoGrad": {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8,
        "weight_decay": 0.0, "amsgrad": False, "reg_inside_moment": False, "grad_averaging": True,
        "norm_type": 2, "init_zero": False, "set_grad_none": True,
    },
    "FusedAdagrad": {
        "lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "set_grad_none": True,
        "adagrad_w_mode": False,
    },
    "FusedMixedPrecisionLamb": {
        "lr": 1e-3, "step": 0, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
        "weight_decay": 0.01, "amsgrad": False, "adam_w_mode": True, "grad_averaging": True,
        "max_grad_norm": 1.0, "use_nvlamb": False, "reduced_precision_dtype": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_apexs(optimizers: Any, name: str) -> None:
    params = inspect.signature(getattr(optimizers, name)).parameters.values()
    positional = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "params"]
    assert {p.name: p.default for p in positional} == DEFAULTS[name]
    assert [p.name for p in positional] == list(DEFAULTS[name])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "FusedSGD"])
def test_a_number_that_yaml_read_as_a_string_is_refused(optimizers: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"lr must be a number.*'1e-3'; call {name}\(params, lr=f"):
        make(optimizers, name, parameters(), lr="1e-3")


def test_they_lie_where_apex_had_them(optimizers: Any, contrib: Any) -> None:
    modules = ["fused_adam", "fused_sgd", "fused_lamb", "fused_novograd", "fused_adagrad"]
    modules += ["fused_mixed_precision_lamb"]
    for module, name in zip(modules, NAMES, strict=True):
        found = getattr(importlib.import_module(f"apex.optimizers.{module}"), name)
        assert found is getattr(optimizers, name)
        assert found.__module__ == f"apex.optimizers.{module}"
    for module in ("fp16_optimizer", "fused_adam", "fused_lamb", "fused_sgd"):
        importlib.import_module(f"apex.contrib.optimizers.{module}")
    assert contrib.FP16_Optimizer is not optimizers.FP16_Optimizer


STATES = {
    "FusedAdam": {"exp_avg", "exp_avg_sq"},
    "FusedSGD": {"momentum_buffer"},
    "FusedLAMB": {"exp_avg", "exp_avg_sq"},
    "FusedNovoGrad": {"exp_avg"},
    "FusedAdagrad": {"sum"},
    "FusedMixedPrecisionLamb": {"exp_avg", "exp_avg_sq"},
}


@pytest.mark.parametrize("name", NAMES)
def test_state_has_apexs_layout_and_goes_round(optimizers: Any, name: str) -> None:
    params, others = parameters(0, F32), parameters(0, F32)
    optimizer = make(optimizers, name, params)
    for seed in range(2):
        give_gradients(params, seed)
        optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert all(set(entry) == STATES[name] for entry in saved["state"].values())
    assert saved["param_groups"][0].get("step", 2) == 2
    assert ("step" in saved["param_groups"][0]) == (name not in ("FusedSGD", "FusedAdagrad"))
    loaded = make(optimizers, name, others)
    loaded.load_state_dict(saved)
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param)
    compared(others, loaded, params, optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_step_as_the_original(
    optimizers: Any, name: str, copied: Callable[[Any], Any]
) -> None:
    params = parameters(0, F32)
    options: dict[str, Any] = {"use_nvlamb": True} if "use_nvlamb" in DEFAULTS[name] else {}
    options |= {"adam_w_mode": False} if "adam_w_mode" in DEFAULTS[name] else {}
    options |= {"weight_decay": 0.5} if name != "FusedMixedPrecisionLamb" else {}
    options |= {"wd_after_momentum": True} if name == "FusedSGD" else {}
    options |= {"adagrad_w_mode": True} if name == "FusedAdagrad" else {}
    options |= {"reg_inside_moment": True} if name == "FusedNovoGrad" else {}
    optimizer = make(optimizers, name, params, **options)
    give_gradients(params, 0)
    optimizer.step()
    other = copied(optimizer)
    theirs = other.param_groups[0]["params"]
    compared(theirs, other, params, optimizer)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB"])
def test_state_of_torchs_adam_loads(optimizers: Any, name: str) -> None:
    ours, theirs = parameters(), parameters()
    expected = torch.optim.AdamW(theirs, lr=0.25, weight_decay=0.25)
    for seed in range(2):
        give_gradients(theirs, seed)
        expected.step()
    optimizer = make(optimizers, name, ours)
    # torch itself does not copy what it loads.
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["step"], group["lr"], group["bias_correction"]) == (2, 0.25, True)
    assert set(optimizer.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}
    if name == "FusedAdam":
        for param, other in zip(ours, theirs, strict=True):
            param.data.copy_(other)
        compared(ours, optimizer, theirs, expected)


def test_state_of_torchs_sgd_without_momentum_loads(optimizers: Any) -> None:
    params = parameters()
    expected = torch.optim.SGD(params, lr=0.5)
    give_gradients(params, 0)
    expected.step()
    optimizer = optimizers.FusedSGD(params, lr=0.5)
    optimizer.load_state_dict(expected.state_dict())
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    near([optimizer.state[params[1]]["momentum_buffer"]], [params[1].grad])


def test_state_of_half_parameters_loads_without_rounding(optimizers: Any) -> None:
    params = parameters(0, F16)
    optimizer = optimizers.FusedAdam(params)
    give_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    tiny = torch.full_like(saved["state"][1]["exp_avg_sq"], 1e-12)
    saved["state"][1]["exp_avg_sq"] = tiny
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[params[1]]["exp_avg_sq"]
    assert torch.equal(loaded, tiny)
    assert loaded.data_ptr() != tiny.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_cleared_as_told(optimizers: Any, name: str) -> None:
    params = parameters()
    optimizer = make(optimizers, name, params)
    is_none_by_default = name != "FusedSGD"
    for arguments, is_none in [
        ({}, is_none_by_default),
        ({"set_to_none": True}, True),
        ({"set_to_none": False}, False),
    ]:
        give_gradients(params, 0)
        optimizer.zero_grad(**arguments)
        cleared = [p.grad is None or not p.grad.any() for p in params]
        assert all(cleared)
        assert all((p.grad is None) == is_none for p in params)


@pytest.mark.parametrize("name", NAMES)
def test_a_closure_is_evaluated_once_with_gradients(optimizers: Any, name: str) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = make(optimizers, name, [param], lr=0.125)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == [True]
    assert (param < 1).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "amsgrad" in DEFAULTS[name]])
def test_amsgrad_is_refused(optimizers: Any, name: str) -> None:
    message = f"{name} has no AMSGrad variant; got amsgrad=True. Leave it out, or use torch.optim"
    with pytest.raises(RuntimeError, match=message):
        make(optimizers, name, parameters(), amsgrad=True)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients_are_refused(optimizers: Any, name: str) -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    optimizer = make(optimizers, name, layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    message = f"{name} needs dense gradients; got a sparse one. Build .* torch.optim.SparseAdam"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.5}, "lr must be at least 0; got -0.5; call"),
        ({"lr": 1.0, "momentum": -1}, "momentum must be at least 0; got -1; call"),
        ({"lr": 1.0, "weight_decay": -1}, "weight_decay must be at least 0; got -1; call"),
        ({"lr": 1.0, "nesterov": True}, "Nesterov momentum requires a momentum and zero damp"),
        ({}, "parameter group didn't specify a value of required optimization parameter lr"),
    ],
)
def test_sgd_refuses_what_cannot_be(optimizers: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizers.FusedSGD(parameters(), **options)


def test_adam_refuses_what_it_has_not(optimizers: Any) -> None:
    with pytest.raises(RuntimeError, match="master weights only where it is capturable; got"):
        optimizers.FusedAdam(parameters(), master_weights=True)
    for other in ("capturable=True", "adam_w_mode=False"):
        name, _, value = other.partition("=")
        options = {"eps_inside_sqrt": False, name: value == "True"}
        with pytest.raises(RuntimeError, match=f"of 2019 is not .*; got .* and {other}; leave"):
            optimizers.FusedAdam(parameters(), **options)


def test_novograd_refuses_other_norms_and_others_state(optimizers: Any) -> None:
    with pytest.raises(RuntimeError, match="norm_type must be 2, or 0 .*; got 1; call"):
        optimizers.FusedNovoGrad(parameters(), norm_type=1)
    params = parameters()
    optimizer = optimizers.FusedNovoGrad(params)
    give_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["exp_avg_sq"][1] = torch.ones(2)
    with pytest.raises(RuntimeError, match="one norm for each of the 3 parameters .*; got 2; call"):
        optimizer.step()


def test_novograd_norms_follow_parameters_to_another_dtype(optimizers: Any) -> None:
    params = parameters(0, F32)
    optimizer = optimizers.FusedNovoGrad(params)
    give_gradients(params, 0)
    optimizer.step()
    norms = optimizer.param_groups[0]["exp_avg_sq"][1].clone()
    for param in params:
        param.data = param.data.half()
    give_gradients(params, 0)
    optimizer.step()
    half, full = optimizer.param_groups[0]["exp_avg_sq"]
    near([half], [norms], 1e-3)
    assert full.numel() == 0


@pytest.mark.parametrize("name", NAMES)
def test_groups_can_be_added_and_schedulers_steer(optimizers: Any, name: str) -> None:
    first, second = parameters(0), parameters(1)
    optimizer = make(optimizers, name, first, lr=0.5)
    give_gradients(first, 0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    optimizer.step()
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    optimizer.add_param_group({"params": second, "lr": 0.0})
    before = [param.detach().clone() for param in second]
    give_gradients(second, 0)
    give_gradients(first, 1)
    optimizer.step()
    near(second, before)
    assert float(optimizer.param_groups[1].get("step", 1)) == 1
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    assert not torch.equal(second[1], before[1])


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 8, generator=generator)
    return model, x, torch.stack([x[:, i : i + 4].sum(1) for i in range(4)], 1)


def trained(optimizers: Any, name: str, level: str | None, steps: int = 30) -> tuple[float, Any]:
    model, x, y = model_and_data()
    lr = 0.125 if name == "FusedNovoGrad" else 0.03125
    optimizer = make(optimizers, name, model.parameters(), lr=lr)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seen = []
    hook = model[0].register_forward_hook(lambda *arguments: seen.append(arguments[2].dtype))
    for _ in range(steps):
        loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        if level:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
    hook.remove()
    final = (model(x).float() - y).square().mean().item()
    if level:
        amp.deactivate()
    return final, seen[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_level_trains_as_fp32_does(optimizers: Any, name: str) -> None:
    model, x, y = model_and_data()
    start = (model(x) - y).square().mean().item()
    expected, _ = trained(optimizers, name, None)
    assert expected < 0.8 * start
    halves = {"O0": F32, "O1": F16, "O2": F16, "O3": F16, "O4": BF16, "O5": BF16}
    for level, half in halves.items():
        loss, seen = trained(optimizers, name, level)
        assert seen is half
        assert loss == pytest.approx(expected, rel=0.1 if level == "O3" else 0.05), level


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_counts_nothing(optimizers: Any, name: str, level: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(optimizers, name, model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    with amp.scale_loss(model(torch.ones(1, 3)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert not optimizer.state
    assert int(optimizer.param_groups[0].get("step", 0)) == 0
    near(amp.master_params(optimizer), before)
    amp.deactivate()


def test_state_saved_at_O2_resumes_bit_for_bit(optimizers: Any) -> None:
    def run(saved: Any = None, steps: int = 2) -> tuple[Any, Any]:
        model, x, y = model_and_data()
        optimizer = optimizers.FusedLAMB(model.parameters(), lr=0.03125)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            amp.load_state_dict(saved["amp"])
        for _ in range(steps):
            with amp.scale_loss((model(x) - y).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        state = copy.deepcopy(state)
        amp.deactivate()
        return state["model"], state

    straight, _ = run(steps=4)
    _, half_way = run(steps=2)
    resumed, _ = run(half_way, steps=2)
    assert half_way["optimizer"]["param_groups"][0]["step"] == 2
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


class TestCapturable:
    @pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
    @pytest.mark.parametrize("unscaled_before", [False, True])
    def test_torchs_scaler_leaves_it_to_unscale(
        self, optimizers: Any, name: str, unscaled_before: bool
    ) -> None:
        options = {"capturable": True} if name == "FusedAdam" else {}
        ours, theirs = parameters(0, F32), parameters(0, F32)
        optimizer = make(optimizers, name, ours, **options)
        plain = {"FusedAdam": "FusedAdam", "FusedMixedPrecisionLamb": "FusedLAMB"}[name]
        expected = make(optimizers, plain, theirs)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for seed in range(3):
            give_gradients(theirs, seed)
            expected.step()
            for param, other in zip(ours, theirs, strict=True):
                param.grad = other.grad * scaler.scale(torch.ones(()))
            if unscaled_before:
                scaler.unscale_(optimizer)
            with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
                scaler.step(optimizer)
            scaler.update()
            near(ours, theirs)
        assert optimizer.param_groups[0]["step"].tolist() == [3]

    @pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
    def test_what_is_not_finite_is_skipped(self, optimizers: Any, name: str) -> None:
        params = parameters(0, F32)
        options = {"capturable": True} if name == "FusedAdam" else {}
        optimizer = make(optimizers, name, params, **options)
        before = [param.detach().clone() for param in params]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        give_gradients(params, 0)
        params[1].grad[0] = float("inf")
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer)
        scaler.update()
        near(params, before)
        assert optimizer.param_groups[0]["step"].tolist() == [0]
        assert scaler.get_scale() == 32.0

    @pytest.mark.parametrize("name", ["FusedAdam", "FusedMixedPrecisionLamb"])
    def test_a_flag_on_the_device_skips_it(self, optimizers: Any, name: str) -> None:
        params = [nn.Parameter(torch.ones(3))]
        options = {"capturable": True} if name == "FusedAdam" else {}
        optimizer = make(optimizers, name, params, **options)
        assert skips_by_flag(optimizer)
        params[0].grad = torch.ones(3)
        for flag, count in ((1.0, 0), (0.0, 1)):
            step_by_flag(optimizer, torch.tensor(flag), optimizer.step)
            assert optimizer.param_groups[0]["step"].tolist() == [count]
            assert torch.equal(params[0].detach(), torch.ones(3)) == (count == 0)

    def test_adam_skips_by_flag_only_where_it_is_capturable(self, optimizers: Any) -> None:
        assert not skips_by_flag(optimizers.FusedAdam(parameters()))

    def test_masters_keep_what_half_cannot(self, optimizers: Any) -> None:
        params = [nn.Parameter(torch.ones(3, dtype=F16))]
        options = {"lr": 2.0**-13, "eps": 0.0}
        optimizer = optimizers.FusedAdam(params, capturable=True, master_weights=True, **options)
        for _ in range(8):
            params[0].grad = torch.ones(3, dtype=F16)
            optimizer.step()
        near(params, [torch.full((3,), 1 - 8 * 2.0**-13)], 1e-4)

    def test_mixed_precision_lamb_keeps_what_half_cannot(self, optimizers: Any) -> None:
        params = [nn.Parameter(torch.ones(3, dtype=F16)), nn.Parameter(torch.ones(3))]
        optimizer = optimizers.FusedMixedPrecisionLamb(
            params, lr=2.0**-13, weight_decay=0.0, reduced_precision_dtype=F16
        )
        for _ in range(8):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        near(params, [torch.full((3,), 1 - 8 * 2.0**-13)] * 2, 1e-4)
        assert params[0].dtype is F16

    def test_rates_of_groups_are_tensors_of_their_own(self, optimizers: Any) -> None:
        groups = [{"params": [param]} for param in parameters()]
        optimizer = optimizers.FusedAdam(groups, capturable=True)
        optimizer.param_groups[0]["lr"].fill_(7.0)
        assert optimizer.param_groups[1]["lr"].item() == pytest.approx(1e-3)


class AdamOf2019(Adam):
    """The loop of apex's kernel: eps beside what is not corrected, decay times the step size."""

    def prepared(self, grads: list[Any]) -> list[Any]:
        return [None if grad is None else grad * self.options.get("factor", 1.0) for grad in grads]

    def step_one(self, i: int, grad: Tensor) -> None:
        o, (beta1, beta2), (c1, c2) = self.options, self.options["betas"], self.corrections()
        self.first[i] = beta1 * self.first[i] + (1 - beta1) * grad
        self.second[i] = beta2 * self.second[i] + (1 - beta2) * grad**2
        inside, outside = (o["eps"], 0.0) if o["eps_inside_sqrt"] else (0.0, o["eps"])
        update = self.first[i] / ((self.second[i] + inside).sqrt() + outside)
        step_size = o["lr"] * c2**0.5 / c1
        self.params[i] = self.params[i] - step_size * (update + o["weight_decay"] * self.params[i])


class TestInterfaceOf2019:
    @pytest.mark.parametrize("package", ["apex.optimizers", "apex.contrib.optimizers"])
    @ONE_FIXTURE
    @given(
        options=st.fixed_dictionaries({**ADAM, "eps_inside_sqrt": st.booleans()}),
        dtype=st.sampled_from([F64, F32]),
        missing=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=2, max_size=4),
    )
    def test_adam_follows_the_formula_of_then(
        self, optimizers: Any, package: str, options: Any, dtype: torch.dtype, missing: Any
    ) -> None:
        params = parameters(0, dtype)
        expected = AdamOf2019(params, **options)
        optimizer = importlib.import_module(package).FusedAdam(params, **options)
        for seed, which in enumerate(missing):
            give_gradients(params, seed, which)
            optimizer.step()
            expected.step([param.grad for param in params])
            near(params, expected.params, 1e-12 if dtype is F64 else 1e-5)

    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_half_parameters_are_rounded_once(self, contrib: Any, dtype: torch.dtype) -> None:
        params = parameters(0, dtype)
        options = {"lr": 0.25, "eps": 1e-4, "weight_decay": 0.25, "eps_inside_sqrt": True}
        expected = AdamOf2019(params, betas=(0.9, 0.999), bias_correction=True, **options)
        optimizer = contrib.FusedAdam(params, **options)
        give_gradients(params, 0)
        optimizer.step()
        expected.step([param.grad for param in params])
        assert all(
            torch.equal(p, e.to(dtype)) for p, e in zip(params, expected.params, strict=True)
        )
        assert all(entry["exp_avg"].dtype is F32 for entry in optimizer.state.values())

    @pytest.mark.parametrize(
        ("options", "mode"),
        [
            ({}, None),
            ({"eps_inside_sqrt": True}, 0),
            ({"eps_inside_sqrt": False}, 1),
            ({"max_grad_norm": 1.0}, 1),
            ({"use_mt": False}, 1),
            ({"amp_scale_adjustment": 1.0}, 1),
        ],
    )
    def test_who_gives_an_argument_of_then_gets_the_formula_of_then(
        self, optimizers: Any, contrib: Any, options: dict[str, Any], mode: int | None
    ) -> None:
        assert optimizers.FusedAdam(parameters(), **options).eps_mode == mode
        assert contrib.FusedAdam(parameters(), **options).eps_mode == (1 if mode is None else mode)

    def test_copies_keep_the_formula(self, contrib: Any) -> None:
        params = parameters(0, F32)
        optimizer = contrib.FusedAdam(params, eps_inside_sqrt=True, eps=1e-2)
        give_gradients(params, 0)
        optimizer.step()
        other = pickle.loads(pickle.dumps(optimizer))
        compared(other.param_groups[0]["params"], other, params, optimizer)

    @pytest.mark.parametrize("from_contrib", [True, False])
    @pytest.mark.parametrize("limit", [0.5, 100.0])
    def test_adam_steps_given_gradients(
        self, optimizers: Any, contrib: Any, from_contrib: bool, limit: float
    ) -> None:
        kind = contrib.FusedAdam if from_contrib else optimizers.FusedAdam
        params, others = parameters(0, F32), parameters(0, F32)
        # With a large eps the step is not the same at every scale of the gradients.
        optimizer = kind(params, lr=0.25, eps=1.0, max_grad_norm=limit)
        outputs = [param.detach().half() for param in params]
        give_gradients(others, 0)
        grads = [(param.grad * 64).half() for param in others]
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        given = [param.detach().clone() for param in params]
        optimizer.step(grads=grads, output_params=outputs, scale=64.0, grad_norms=[norm])
        options = {"lr": 0.25, "eps": 1.0, "betas": (0.9, 0.999), "bias_correction": True}
        factor = min(1.0, limit / (norm.item() / 64))
        expected = AdamOf2019(
            others, **options, weight_decay=0.0, eps_inside_sqrt=False, factor=factor
        )
        expected.step([grad.double() / 64 for grad in grads])
        near(params, expected.params, 1e-4)
        near(outputs, [param.half() for param in params])
        assert all(param.grad is None for param in params)
        assert not torch.equal(params[1], given[1])

    def test_the_norm_is_taken_where_none_is_given(self, optimizers: Any) -> None:
        params, others = parameters(), parameters()
        clipping = optimizers.FusedAdam(params, lr=0.25, eps=1.0, max_grad_norm=0.5)
        plain = optimizers.FusedAdam(others, lr=0.25, eps=1.0, max_grad_norm=0.0)
        for seed in range(2):
            give_gradients(params, seed)
            give_gradients(others, seed)
            torch.nn.utils.clip_grad_norm_(others, 0.5)
            clipping.step()
            plain.step()
            near(params, others)

    def test_arguments_of_adam_are_in_the_order_of_old(self, contrib: Any) -> None:
        names = list(inspect.signature(contrib.FusedAdam).parameters)
        assert names == [
            "params", "lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay",
            "max_grad_norm", "amsgrad", "use_mt", "amp_scale_adjustment",
        ]  # fmt: skip

    def test_sgd_steps_given_gradients(self, contrib: Any) -> None:
        param, output = nn.Parameter(torch.ones(2)), torch.zeros(2, dtype=F16)
        optimizer = contrib.FusedSGD([param], lr=0.5)
        optimizer.step(grads=[torch.full((2,), 4.0).half()], output_params=[output], scale=8.0)
        assert output.tolist() == [0.75, 0.75]

    def test_lists_that_are_not_one_for_each_group_are_refused(self, contrib: Any) -> None:
        optimizer = contrib.FusedSGD([nn.Parameter(torch.ones(2))], lr=0.5)
        with pytest.raises(
            RuntimeError, match="a list for each of the optimizer's 1 groups; got 2"
        ):
            optimizer.step(grads=[[torch.ones(2)], [torch.ones(2)]])


def test_a_subclass_may_step_by_the_names_that_apex_had(optimizers: Any) -> None:
    """As fairseq does."""
    applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    param = nn.Parameter(torch.ones(3))
    optimizer = optimizers.FusedAdam([param])
    lists = [[torch.ones(3)], [param.data], [torch.zeros(3)], [torch.zeros(3)]]
    rest = (0.25, 0.9, 0.99, 0.0, 1, optimizer.adam_w_mode, 1, 0.0)
    applier(optimizer.multi_tensor_adam, optimizer._dummy_overflow_buf, lists, *rest)
    near([param], [torch.full((3,), 0.75)])
    assert optimizer.adam_w_mode == 1


def test_momenta_are_made_on_demand(optimizers: Any) -> None:
    params = parameters()
    optimizer = optimizers.FusedSGD(params, lr=0.5, momentum=0.5)
    momenta, is_first = optimizer.get_momentums(params)
    assert (len(momenta), is_first) == (3, True)
    assert optimizer.get_momentums(params)[1] is False
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
