"""apex's FusedAdam, FusedSGD and FusedLAMB by the CUDA kernels, which the CPU runs here."""

from __future__ import annotations

import copy
import importlib
import pickle
import types
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_optimizers_drop_in import OPTIONS, REFERENCES, give_gradients, make, near, parameters
from torch import Tensor, nn

import amp_patch.apex
from amp_patch import amp
from amp_patch.optimizers import registry
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.lazy_gradients import LazyGradients

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHARES_APEX = True
SOURCES = {"FusedAdam": "adamw", "FusedSGD": "sgd", "FusedLAMB": "lamb"}
each = pytest.mark.parametrize("name", SOURCES)
ONE_FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def optimizers(apex: types.ModuleType) -> Any:
    return importlib.import_module("apex.optimizers")


def own_launches(gpu: Gpu, name: str) -> list[str]:
    """Return the launches of one optimizer's kernels."""
    return [one for one in gpu.modules.launched if one.startswith(SOURCES[name])]


def in_two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:]}]


def refuse_amp_c(monkeypatch: pytest.MonkeyPatch, optimizers: Any) -> None:
    """Let nothing but kernels step."""

    def refused(*_: Any) -> None:
        raise AssertionError("an operation of amp_C was called")

    for name, operation in [("FusedAdam", "adam"), ("FusedSGD", "sgd"), ("FusedLAMB", "lamb")]:
        monkeypatch.setattr(
            getattr(optimizers, name), f"multi_tensor_{operation}", staticmethod(refused)
        )


@each
@ONE_FIXTURE
@given(data=st.data(), missing=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=2, max_size=4))
def test_steps_follow_the_formula_in_float64(
    gpu: Gpu, optimizers: Any, name: str, data: st.DataObject, missing: list[int | None]
) -> None:
    options = data.draw(st.fixed_dictionaries(OPTIONS[name]))
    params = parameters(dtype=F32)
    expected = REFERENCES[name](params, **options)
    optimizer = getattr(optimizers, name)(params, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        refuse_amp_c(monkeypatch, optimizers)
        for seed, which in enumerate(missing):
            give_gradients(params, seed, which)
            versions = [param._version for param in params]
            before = len(own_launches(gpu, name))
            optimizer.step()
            assert len(own_launches(gpu, name)) > before
            moved = [param._version > old for param, old in zip(params, versions, strict=True)]
            assert moved == [param.grad is not None for param in params]
            expected.step([param.grad for param in params])
            near(params, expected.params, 2e-5)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_sgd_has_nesterov_momentum_and_decay_in_both_places(
    gpu: Gpu, optimizers: Any, nesterov: bool, after: bool
) -> None:
    options = {"lr": 0.25, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.25}
    options |= {"nesterov": nesterov, "wd_after_momentum": after}
    params = parameters(dtype=F32)
    expected = REFERENCES["FusedSGD"](params, **options)
    optimizer = optimizers.FusedSGD(params, **options)
    for seed in range(4):
        give_gradients(params, seed)
        optimizer.step()
        expected.step([param.grad for param in params])
    near(params, expected.params)
    assert len(own_launches(gpu, "FusedSGD")) == 8


def stepped(optimizers: Any, name: str, seeds: range, saved: Any = None) -> tuple[Any, Any]:
    """Step parameters in two groups, of which the second has no gradient at first."""
    params = parameters(dtype=F32)
    optimizer = make(optimizers, name, in_two_groups(params))
    if saved is not None:
        optimizer.load_state_dict(copy.deepcopy(saved[1].state_dict()))
        for param, other in zip(params, saved[0], strict=True):
            param.data.copy_(other)
    for seed in seeds:
        give_gradients(params, seed, 2 if seed == 0 else None)
        optimizer.step()
    return params, optimizer


@each
@pytest.mark.parametrize("kernels_first", [True, False])
def test_the_state_is_that_of_the_reference_and_goes_to_it_and_back(
    optimizers: Any, name: str, kernels_first: bool, pytestconfig: pytest.Config
) -> None:
    straight = stepped(optimizers, name, range(4))

    def part(seeds: range, saved: Any, by_kernels: bool) -> Any:
        if not by_kernels:
            return stepped(optimizers, name, seeds, saved)
        with pytest.MonkeyPatch.context() as monkeypatch:
            gpu = Gpu(monkeypatch, pytestconfig)
            result = stepped(optimizers, name, seeds, saved)
            assert own_launches(gpu, name)
        return result

    half_way = part(range(2), None, kernels_first)
    params, optimizer = part(range(2, 4), half_way, not kernels_first)
    near(params, straight[0], 1e-5)
    ours, theirs = optimizer.state_dict(), straight[1].state_dict()
    assert [group.get("step") for group in ours["param_groups"]] == [
        group.get("step") for group in theirs["param_groups"]
    ]
    for index, state in theirs["state"].items():
        assert ours["state"][index].keys() == state.keys()
        near(ours["state"][index].values(), state.values(), 1e-5)


def test_a_group_counts_steps_without_gradients(gpu: Gpu, optimizers: Any) -> None:
    for name in ("FusedAdam", "FusedLAMB"):
        _, optimizer = stepped(optimizers, name, range(1))
        assert [group["step"] for group in optimizer.param_groups] == [1, 1]
        assert own_launches(gpu, name)


# --- with amp ---


class Training:
    """A model with a norm, at a level of apex.amp or of ours."""

    def __init__(self, optimizers: Any, name: str, level: str, fused: bool | None = None) -> None:
        torch.manual_seed(0)
        # a bias before a norm would have rounding errors for gradients
        layers = [nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)]
        model = nn.Sequential(*layers)
        groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
        eps = {} if name == "FusedSGD" else {"eps": 1e-3}
        optimizer = make(optimizers, name, groups, lr=0.03125, **eps)
        self.amp = importlib.import_module("apex").amp if fused is None else amp
        options: dict[str, Any] = {} if fused is None else {"fused_step": fused}
        self.model, self.optimizer = self.amp.initialize(
            model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options
        )

    def train(self, seed: int, factor: float = 1.0) -> None:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        loss = self.model(inputs).float().square().mean() * factor
        self.optimizer.zero_grad()
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()

    def result(self) -> list[Tensor]:
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for master, param in zip(masters, self.model.parameters(), strict=True):
            assert torch.equal(param, master.to(param.dtype))
        return [master.detach().clone() for master in masters]


FACTORS = (1.0, float("inf"), 2.0, 0.5)


def trained(optimizers: Any, name: str, level: str, fused: bool | None = None) -> Any:
    training = Training(optimizers, name, level, fused)
    for seed, factor in enumerate(FACTORS):
        training.train(seed, factor)
    steps = [group.get("step") for group in training.optimizer.param_groups]
    result = training.result()
    amp.deactivate()
    return result, steps


@each
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("fused", [None, True])
def test_every_level_trains_by_kernels(
    optimizers: Any, name: str, level: str, fused: bool | None, pytestconfig: pytest.Config
) -> None:
    if fused and level not in ("O2", "O5"):
        pytest.skip("fused_step is for levels with masters")
    cuda_on_cpu.require_compiler()
    expected, steps = trained(optimizers, name, level)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Gpu(monkeypatch, pytestconfig)
        found, counted = trained(optimizers, name, level, fused)
        half = {"O2": "float16", "O5": "bfloat16"}.get(level, "") if fused else ""
        weights = {one for one in own_launches(gpu, name) if half and half in one}
        assert bool(weights) == bool(half)
    near(found, expected, 1e-5)
    assert counted == steps
    assert own_launches(gpu, name)


@each
def test_fused_step_on_the_cpu_is_the_optimizers_own(optimizers: Any, name: str) -> None:
    ours, theirs = (trained(optimizers, name, "O2", fused) for fused in (True, False))
    assert all(map(torch.equal, ours[0], theirs[0]))
    assert ours[1] == theirs[1]


@each
def test_a_flag_on_the_device_skips_the_step_and_its_count(
    gpu: Gpu, optimizers: Any, name: str
) -> None:
    params = parameters(dtype=F32)
    optimizer = make(optimizers, name, params)
    step, counts = FusedStep(optimizer, LazyGradients(), None), []
    assert step.skips_by_flag(optimizer)
    for seed, flag in enumerate([1.0, 0.0, 2.0, 0.0]):
        give_gradients(params, seed)
        before = [param.detach().clone() for param in params]
        step.run(optimizer, torch.tensor(flag))
        assert step.has_published
        assert all(map(torch.equal, params, before)) == (flag != 0)
        counts.append(optimizer.param_groups[0].get("step"))
    assert counts == ([None] * 4 if name == "FusedSGD" else [None, 1, 1, 2])


# --- what the kernels leave to the reference ---


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("FusedAdam", F16, {}),
        ("FusedSGD", F16, {}),
        ("FusedSGD", BF16, {}),
        ("FusedLAMB", BF16, {}),
        ("FusedAdam", torch.float64, {}),
        ("FusedAdam", F32, {"max_grad_norm": 0.5}),
        ("FusedAdam", F32, {"capturable": True}),
        ("FusedAdam", F16, {"capturable": True, "master_weights": True}),
        ("FusedNovoGrad", F32, {}),
        ("FusedAdagrad", F32, {}),
        ("FusedMixedPrecisionLamb", F32, {}),
    ],
)
def test_what_no_kernel_computes_is_stepped_by_the_reference(
    optimizers: Any,
    name: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    pytestconfig: pytest.Config,
) -> None:
    def run() -> tuple[list[nn.Parameter], Any]:
        params = parameters(0, dtype)
        optimizer = make(optimizers, name, in_two_groups(params), **options)
        for seed in range(3):
            give_gradients(params, seed)
            optimizer.step()
        return params, optimizer

    expected, theirs = run()
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Gpu(monkeypatch, pytestconfig)
        params, ours = run()
    assert not [one for one in gpu.modules.launched if one.endswith("_prepare")]
    assert all(map(torch.equal, params, expected))
    for param, other in zip(params, expected, strict=True):
        for key, value in theirs.state[other].items():
            assert torch.equal(ours.state[param][key], value)
            assert ours.state[param][key].dtype is value.dtype


def own_tensors(optimizer: Any, params: list[nn.Parameter]) -> list[Tensor]:
    return [value for param in params for value in optimizer.state[param].values()]


@each
def test_a_group_of_half_and_float32_is_stepped_by_the_reference_as_a_whole(
    gpu: Gpu, optimizers: Any, name: str
) -> None:
    params = [*parameters(0, F32), *parameters(1, F16)]
    optimizer = make(optimizers, name, params)
    give_gradients(params[:3], 0)
    give_gradients(params[3:], 1)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert own_launches(gpu, name) == []
    assert not any(map(torch.equal, params, before))
    # what half parameters have for momenta is FusedSGD's own affair
    averages = [one for one in own_tensors(optimizer, params) if name != "FusedSGD"]
    assert {one.dtype for one in averages} <= {F32}


@each
def test_a_subclass_steps_as_it_says(gpu: Gpu, optimizers: Any, name: str) -> None:
    kind = getattr(optimizers, name)
    called = []

    class Derived(kind):
        def _count(self, *args: Any) -> None:
            called.append(len(args))

        multi_tensor_adam = multi_tensor_sgd = multi_tensor_lamb = _count

    params = parameters(dtype=F32)
    optimizer = Derived(params, lr=0.5)
    give_gradients(params, 0)
    optimizer.step()
    assert called
    assert own_launches(gpu, name) == []


@each
def test_a_sparse_gradient_is_refused_before_anything_changes(
    gpu: Gpu, optimizers: Any, name: str
) -> None:
    params = parameters(dtype=F32)
    optimizer = make(optimizers, name, params)
    give_gradients(params, 0)
    params[2].grad = params[2].grad.to_sparse()
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="dense gradients; got a sparse one"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert not any(optimizer.state.values())


# --- how a step is called ---


def test_gradients_that_are_handed_to_a_step_are_stepped_by_kernels(
    gpu: Gpu, optimizers: Any
) -> None:
    for name in ("FusedAdam", "FusedSGD"):
        params, others = parameters(dtype=F32), parameters(dtype=F32)
        optimizer, expected = (make(optimizers, name, some) for some in (params, others))
        give_gradients(others, 0)
        grads = [(param.grad * 64).half() for param in others]
        for param, grad in zip(others, grads, strict=True):
            param.grad = grad.float() / 64
        outputs = [torch.zeros_like(grad) for grad in grads]
        optimizer.step(grads=grads, output_params=outputs, scale=64.0)
        launched = len(own_launches(gpu, name))
        expected.step()
        assert launched == 2
        assert all(map(torch.equal, params, others))
        near(outputs, [param.half() for param in params])


@each
def test_a_closure_is_evaluated_once_and_returned(gpu: Gpu, optimizers: Any, name: str) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = make(optimizers, name, [param])
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert own_launches(gpu, name)


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_by_itself(gpu: Gpu, optimizers: Any, name: str, copied: Any) -> None:
    params = parameters(dtype=F32)
    optimizer = make(optimizers, name, params)
    give_gradients(params, 0)
    optimizer.step()
    other = copied(optimizer)
    twins = [param for group in other.param_groups for param in group["params"]]
    for some, one in ((params, optimizer), (twins, other)):
        give_gradients(some, 1)
        one.step()
    assert all(map(torch.equal, params, twins))


def test_an_apex_that_is_imported_anew_takes_its_rows() -> None:
    def rows() -> list[type]:
        return [kind for kind in registry.UPDATES if kind.__module__.startswith("apex.")]

    for _ in range(2):
        with amp_patch.apex.install(force=True):
            optimizers = importlib.import_module("apex.optimizers")
            assert set(rows()) == {getattr(optimizers, name) for name in SOURCES}
