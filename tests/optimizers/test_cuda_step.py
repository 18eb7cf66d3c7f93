"""fused_step=True from gradient to half weight against float64, by the reference and by kernels.

The kernels run as the CPU runs their text, on tensors that look like a GPU's, and on a GPU.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from cuda_on_cpu.launcher import EmulatedModules
from float64_lamb import Lamb
from hypothesis import given
from hypothesis import strategies as st
from support import exactly, scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from amp_patch.kernels import cuda_module
from amp_patch.optimizers import FusedLAMB
from amp_patch.optimizers.adam import AdamWUpdate
from amp_patch.optimizers.cuda_step import CudaStep
from amp_patch.session import session
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import stored_grad

INF = float("inf")
CPU = torch.device("cpu")
LR = 0.05
SHAPES = [(3, 5), (1,), (17,), (2, 3)]


@dataclass(frozen=True)
class Rule:
    """An optimizer with its options, and its kernels' source."""

    kind: Callable[..., Optimizer]
    source: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Any) -> Optimizer:
        return self.kind(params, lr=LR, **self.options)


RULES = {
    "adamw": Rule(AdamW, "adamw", {"eps": 1e-3, "weight_decay": 0.1}),
    "adam amsgrad": Rule(Adam, "adamw", {"eps": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    "adam maximize": Rule(Adam, "adamw", {"eps": 1e-3, "maximize": True}),
    "sgd": Rule(SGD, "sgd"),
    "sgd momentum": Rule(SGD, "sgd", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd nesterov": Rule(SGD, "sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "rmsprop": Rule(RMSprop, "rmsprop", {"eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop centered": Rule(
        RMSprop, "rmsprop", {"eps": 1e-2, "centered": True, "momentum": 0.9, "maximize": True}
    ),
    "adagrad": Rule(
        Adagrad, "adagrad",
        {"eps": 1e-3, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "lamb": Rule(FusedLAMB, "lamb", {"eps": 1e-3}),
    "lamb coupled": Rule(
        FusedLAMB, "lamb", {"eps": 1e-3, "adam_w_mode": False, "max_grad_norm": 0.3}
    ),
    "lamb plain": Rule(
        FusedLAMB, "lamb",
        {"eps": 1e-3, "max_grad_norm": None, "use_nvlamb": True, "weight_decay": 0.0,
         "bias_correction": False, "grad_averaging": False},
    ),
}  # fmt: skip


class Exact:
    """torch's optimizer, or the LAMB of the tests, in float64."""

    def __init__(self, rule: Rule, values: list[Tensor]) -> None:
        self.params = [value.detach().double().clone().requires_grad_() for value in values]
        self.lamb: Lamb | None = None
        if rule.kind is FusedLAMB:
            optimizer = rule.make(self.params)
            options = dict(optimizer.defaults)
            self.lamb = Lamb(self.params, options.pop("max_grad_norm"), **options)
            self.params = self.lamb.params
        else:
            self.optimizer = rule.kind(self.params, lr=LR, foreach=False, **rule.options)

    def step(self, grads: list[Tensor | None]) -> None:
        if self.lamb is not None:
            self.lamb.step(grads)
            return
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.optimizer.step()


class Weights(nn.Module):
    """Parameters whose gradients a test gives; those of the norm stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        pairs = zip(self.parameters(), grads, strict=True)
        return sum((p.float() * g).sum() for p, g in pairs if g is not None)


class Trial:
    """A training whose gradients are given, and what float64 makes of them."""

    def __init__(
        self, amp: ModuleType, rule: Rule, level: str, scale: float, device: torch.device = CPU
    ) -> None:
        torch.manual_seed(0)
        self.amp, self.scale = amp, scale
        model = Weights().to(device, torch.float32)
        params = list(model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        self.exact = Exact(rule, params)
        self.model, self.optimizer = amp.initialize(
            model, rule.make(groups), opt_level=level, loss_scale=scale, verbosity=0,
            fused_step=True,
        )  # fmt: skip
        self.masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.grads: list[Tensor | None] = [None] * len(params)

    def backward(self, seed: int, missing: int, factor: float) -> bool:
        generator = torch.Generator().manual_seed(seed)
        given: list[Any] = [
            torch.randn(p.shape, generator=generator).to(p.device) for p in self.masters
        ]
        if missing < len(given):
            given[missing] = None
        for param in self.model.parameters():
            param.grad = None
        loss = self.model(given) * factor
        scaled_backward(self.amp, loss, self.optimizer)
        for i, param in enumerate(self.model.parameters()):
            if param.grad is not None:
                is_half = param.dtype is not torch.float32
                self.grads[i] = param.grad.double() / (self.scale if is_half else 1.0)
        return factor != INF

    def clip(self, max_norm: float) -> None:
        norm = self.amp.clip_grad_norm_(self.optimizer, max_norm)
        squares = [grad.square().sum() for grad in self.grads if grad is not None]
        expected = torch.stack(squares).sum().sqrt()
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0.0)
        factor = min(1.0, max_norm / (expected.item() + 1e-6))
        self.grads = [grad if grad is None else grad * factor for grad in self.grads]

    def double_gradients(self) -> None:
        for i, master in enumerate(self.masters):
            if self.grads[i] is not None:
                torch.testing.assert_close(
                    master.grad.double(), self.grads[i], rtol=1e-5, atol=1e-7
                )
                master.grad.mul_(2)
                self.grads[i] = self.grads[i] * 2

    def step(self, is_finite: bool) -> None:
        self.optimizer.step()
        assert self.amp.step_was_skipped(self.optimizer) != is_finite
        if is_finite:
            self.exact.step(self.grads)
        self.grads = [None] * len(self.grads)
        self.check()

    def check(self) -> None:
        for master, param, exact in zip(
            self.masters, self.model.parameters(), self.exact.params, strict=True
        ):
            torch.testing.assert_close(master.double(), exact.detach(), rtol=2e-5, atol=2e-6)
            assert torch.equal(param, master.to(param.dtype))


@dataclass(frozen=True)
class Place:
    """Where a training runs.

    Attributes:
        launched: the names of the kernels so far; None where the reference runs.
    """

    device: torch.device
    launched: list[str] | None


@pytest.fixture(params=["torch", "cuda on cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Run all on the reference, or by kernels."""
    if request.param == "torch":
        return Place(CPU, None)
    if request.param == "cuda on cpu":
        modules = request.getfixturevalue("gpu").modules
        assert isinstance(modules, EmulatedModules)
        return Place(CPU, modules.launched)
    pytest.importorskip("cupy")
    monkeypatch.setenv("AMP_PATCH_KERNELS", "cupy")
    launched: list[str] = []
    launch = cuda_module.modules.launch

    def noted(kernel: cuda_module.Kernel, *arguments: Any) -> None:
        launched.append(kernel.name)
        launch(kernel, *arguments)

    monkeypatch.setattr(cuda_module.modules, "launch", noted)
    return Place(torch.device("cuda", 0), launched)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**16),
            "missing": st.integers(0, 9),
            "factor": st.sampled_from([1.0, 1.0, 1.0, INF]),
            "clip": st.sampled_from([None, None, 0.5, 1000.0]),
            "reads": st.sampled_from([False, False, True]),
        }
    ),
    max_size=3,
)


def run_steps(trial: Trial, steps: list[dict[str, Any]]) -> None:
    for options in steps:
        # a loss that is not finite is found where it is scaled
        factor = options["factor"] if trial.scale != 1.0 else 1.0
        is_finite = trial.backward(options["seed"], options["missing"], factor)
        if is_finite and options["clip"] is not None:
            trial.clip(options["clip"])
        if is_finite and options["reads"]:
            trial.double_gradients()
        trial.step(is_finite)


def test_any_steps_are_those_of_float64(amp: ModuleType, place: Place) -> None:
    kept = Trial(amp, RULES["sgd"], "O2", 1.0, place.device)  # torch stays patched while it lives

    @given(
        name=st.sampled_from(list(RULES)),
        steps=STEPS,
        level=st.sampled_from(["O2", "O5"]),
        scale=st.sampled_from([1.0, 2.0**10]),
    )
    def run(name: str, steps: list[dict[str, Any]], level: str, scale: float) -> None:
        run_steps(Trial(amp, RULES[name], level, scale, place.device), steps)

    run()
    del kept


@pytest.mark.parametrize("lr_on_device", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_kernels_for_halves_and_for_the_rest(
    amp: ModuleType, place: Place, name: str, lr_on_device: bool
) -> None:
    trial = Trial(amp, RULES[name], "O2", 64.0, place.device)
    if lr_on_device:
        for group in trial.optimizer.param_groups:
            group["lr"] = torch.tensor(LR, device=place.device)
    usual = {"missing": 9, "factor": 1.0, "clip": None, "reads": False}
    changes: list[dict[str, Any]] = [{}, {"missing": 1, "clip": 0.5}, {"factor": INF}, {}]
    run_steps(trial, [{"seed": i, **usual, **change} for i, change in enumerate(changes)])
    if place.launched is not None:
        source = RULES[name].source
        mine = {one for one in place.launched if one.startswith(source)}
        updates = ["{0}_{1}_to_{1}"]
        prepares = {f"{source}_prepare"}
        if source == "lamb":
            updates = ["{0}_moments_{1}_to_{1}", "{0}_update_{1}"]
            prepares.add("lamb_ratios")
        launched = (one.format(source, half) for half in ("float16", "float32") for one in updates)
        assert mine == {*prepares, *launched}
        # the kernels wrote the half weights: no cast was needed
        assert not [one for one in place.launched if one.startswith("cast")]


@pytest.mark.parametrize("name", RULES)
def test_the_state_goes_to_torchs_optimizer_and_back(
    amp: ModuleType, place: Place, name: str
) -> None:
    first = Trial(amp, RULES[name], "O2", 64.0, place.device)
    params = [master.detach().clone().requires_grad_() for master in first.masters]
    plain = RULES[name].make([{"params": params[:3]}, {"params": params[3:]}])
    for seed in range(3):
        first.step(first.backward(seed, 9, 1.0))
    follow(params, first.masters)
    plain.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    first.backward(3, 9, 1.0)
    step_apart(plain, params, first)
    first.step(True)
    torch.testing.assert_close(params, first.masters, rtol=2e-5, atol=2e-6)

    second = Trial(amp, RULES[name], "O2", 64.0, place.device)
    follow(list(amp.master_params(second.optimizer)), params)
    second.optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    second.backward(4, 9, 1.0)
    step_apart(plain, params, second)
    second.optimizer.step()
    torch.testing.assert_close(second.masters, params, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_step_counters_of_other_dtypes_count_on(
    amp: ModuleType, place: Place, name: str, dtype: torch.dtype
) -> None:
    trial = Trial(amp, RULES[name], "O2", 64.0, place.device)
    trial.step(trial.backward(0, 9, 1.0))
    for entry in trial.optimizer.state.values():
        entry["step"] = entry["step"].to(dtype)
    for seed in (1, 2):
        trial.step(trial.backward(seed, 9, 1.0))
    assert {entry["step"].item() for entry in trial.optimizer.state.values()} == {3}


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lamb"])
def test_counters_are_float32_whatever_the_default_dtype(
    amp: ModuleType, place: Place, name: str
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        trial = Trial(amp, RULES[name], "O2", 64.0, place.device)
        for seed in range(3):
            trial.step(trial.backward(seed, 9, 1.0))
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def follow(ones: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        one.copy_(other)


def step_apart(optimizer: Optimizer, params: list[Tensor], trial: Trial) -> None:
    """Step an optimizer that amp does not know with a trial's gradients."""
    for param, grad in zip(params, trial.grads, strict=True):
        param.grad = None if grad is None else grad.float()
    optimizer.step()


# --- what kernels read themselves ---


def masters_of(trial: Trial) -> list[Tensor]:
    own = set(map(id, trial.model.parameters()))
    return [master for master in trial.masters if id(master) not in own]


def test_no_gradient_is_unscaled_before_somebody_reads_it(amp: ModuleType, gpu: Gpu) -> None:
    trial = Trial(amp, RULES["sgd"], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    half = trial.model.weights[2]
    scaled = half.grad.clone()
    assert [stored_grad(master) for master in masters_of(trial)] == [None] * 4
    trial.clip(0.5)
    assert [stored_grad(master) for master in masters_of(trial)] == [None] * 4
    assert torch.equal(half.grad, scaled)
    trial.double_gradients()
    assert None not in [stored_grad(master) for master in masters_of(trial)]
    trial.clip(0.25)  # a second time, of what was read
    trial.step(True)
    assert torch.equal(half.grad, scaled)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_a_clip_reads_again_only_what_does_not_wait(
    amp: ModuleType, gpu: Gpu, optimizer: str
) -> None:
    trial = Trial(amp, RULES[optimizer], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    launched = gpu.modules.launched
    launched.clear()
    if optimizer == "lamb":  # it clips in its step
        trial.step(True)
    else:
        trial.clip(0.5)
    looks = ["unscale_float32_to_float32", "summarize", "clip_coefficient"]
    assert [name for name in launched if not name.startswith(("reconcile", "lamb"))] == looks


WRITTEN = (
    "with fused_step=True the gradients of half parameters must stay, from the end of "
    "scale_loss() until optimizer.step(), as backward() left them; got 1 of 4 written to in "
    "place. Write to the gradients of amp.master_params(optimizer), call "
    "amp.clip_grad_norm_(optimizer, ...) to clip, and clear gradients before a backward() outside "
    "of scale_loss()."
)


@pytest.mark.parametrize("reader", ["step", "read", "clip"])
def test_a_write_to_a_half_gradient_is_refused(amp: ModuleType, gpu: Gpu, reader: str) -> None:
    trial = Trial(amp, RULES["sgd"], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    trial.model.weights[2].grad.mul_(0.5)
    read = {
        "step": trial.optimizer.step,
        "read": lambda: masters_of(trial)[0].grad,
        "clip": lambda: trial.clip(0.5),
    }[reader]
    with pytest.raises(RuntimeError, match=exactly(WRITTEN)):
        read()
    trial.optimizer.zero_grad()
    trial.grads = [None] * len(trial.grads)
    trial.backward(1, 9, 1.0)
    trial.step(True)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_cleared_half_gradients_are_not_stepped(
    amp: ModuleType, gpu: Gpu, all_of_them: bool, set_to_none: bool
) -> None:
    trial = Trial(amp, RULES["sgd"], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    for i, param in enumerate(trial.model.parameters()):
        if param.dtype is not torch.float32 and (all_of_them or i == 2):
            param.grad = None if set_to_none else param.grad.zero_()
            trial.grads[i] = None
    trial.step(True)


@pytest.mark.filterwarnings(r"ignore:the backward\(\) of a scaled loss must")
def test_another_optimizers_backward_leaves_waiting_gradients_alone(
    amp: ModuleType, gpu: Gpu
) -> None:
    trial, other = (Trial(amp, RULES["sgd"], "O2", 64.0) for _ in range(2))
    trial.backward(0, 9, 1.0)
    given: list[Any] = [
        None if param.dtype is torch.float32 else torch.ones(param.shape)
        for param in trial.model.parameters()
    ]
    with amp.scale_loss(trial.model(given), other.optimizer) as scaled_loss:
        scaled_loss.backward()
    with pytest.warns(UserWarning, match="What is written to the gradients of half parameters"):
        trial.step(True)


def test_a_norm_that_is_not_accepted_clips_nothing_that_waits(amp: ModuleType, gpu: Gpu) -> None:
    def accept(total: Tensor) -> None:
        raise ArithmeticError

    trial = Trial(amp, RULES["adamw"], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    (step,) = session.optimizers.steps.values()
    with pytest.raises(ArithmeticError):
        step.backward.clip(0.1, 2.0, None, accept)
    trial.clip(0.5)
    trial.step(True)


@pytest.mark.parametrize("clips", [False, True])
def test_what_a_backward_leaves_at_a_master_is_added_to_what_waits(
    amp: ModuleType, gpu: Gpu, clips: bool
) -> None:
    trial = Trial(amp, RULES["adamw"], "O2", 64.0)
    for seed in range(2):
        trial.backward(seed, 9, 1.0)
        (trial.masters[1] * 3.0).sum().backward()
        assert stored_grad(trial.masters[1]) is not None
        trial.grads[1] = trial.grads[1] + 3.0
        if clips:
            trial.clip(0.5)
        trial.step(True)


def test_no_state_is_made_for_a_sparse_gradient_that_the_optimizer_refuses(
    amp: ModuleType, gpu: Gpu
) -> None:
    model = nn.BatchNorm1d(4)
    model, optimizer = amp.initialize(
        model, AdamW(model.parameters()), opt_level="O2", loss_scale=1.0, verbosity=0,
        fused_step=True,
    )  # fmt: skip
    model.weight.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert not any(optimizer.state.values())


def test_accumulated_gradients_are_stepped_as_their_sum(amp: ModuleType, gpu: Gpu) -> None:
    trial = Trial(amp, RULES["adamw"], "O2", 64.0)
    sums: list[Any] = [None] * len(trial.grads)
    for seed, missing in [(0, 9), (1, 2), (2, 9)]:
        trial.grads = [None] * len(trial.grads)
        generator = torch.Generator().manual_seed(seed)
        given: list[Any] = [torch.randn(p.shape, generator=generator) for p in trial.masters]
        if missing < len(given):
            given[missing] = None
        with amp.scale_loss(trial.model(given), trial.optimizer) as scaled_loss:
            scaled_loss.backward()
        for i, one in enumerate(given):
            exact = None if one is None else (one * 64.0).half().double() / 64.0
            sums[i] = exact if sums[i] is None else sums[i] + (0.0 if exact is None else exact)
    for i, param in enumerate(trial.model.parameters()):
        if param.dtype is torch.float32:
            sums[i] = param.grad.double()
    trial.grads = sums
    trial.step(True)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_a_tensor_that_no_kernel_takes_is_stepped_by_the_reference(
    amp: ModuleType, gpu: Gpu, name: str
) -> None:
    trial = Trial(amp, RULES[name], "O2", 64.0)
    trial.backward(0, 9, 1.0)
    for group in trial.optimizer.param_groups:
        for param in group["params"]:
            if param.grad.dim() == 2:
                param.grad = param.grad.t().contiguous().t()
    trial.step(True)
    assert not [one for one in gpu.modules.launched if one.startswith(("sgd", "adamw"))]
    trial.backward(1, 9, 1.0)
    trial.step(True)
    # a first momentum is a copy of the gradient, and has its strides
    launched = [one for one in gpu.modules.launched if one.startswith(("sgd", "adamw"))]
    assert bool(launched) == (name == "adamw")


def test_gradients_that_wait_are_those_of_their_parameters_in_any_order(
    amp: ModuleType, gpu: Gpu
) -> None:
    model = nn.ParameterList(torch.ones(2) for _ in range(3))
    model, optimizer = amp.initialize(
        model, SGD(model.parameters(), lr=1.0), opt_level="O2", loss_scale=64.0, verbosity=0,
        fused_step=True,
    )  # fmt: skip
    for steps in (1, 2):
        optimizer.zero_grad()
        loss = sum((place * param.float()).sum() for place, param in enumerate(model))
        scaled_backward(amp, loss, optimizer)
        optimizer.param_groups[0]["params"].reverse()
        optimizer.step()
        assert [param.tolist() for param in model] == [[1.0 - steps * i] * 2 for i in range(3)]
    assert gpu.modules.launched.count("sgd_float16_to_float16") == 2


def test_a_write_before_the_pass_was_over_is_none_that_is_looked_for(
    amp: ModuleType, gpu: Gpu
) -> None:
    trial = Trial(amp, RULES["sgd"], "O2", 64.0)
    gradients = amp.session.optimizers.steps[trial.optimizer].backward.gradients
    weights = list(trial.model.weights)
    with amp.scale_loss(sum(one.float().sum() for one in weights), trial.optimizer) as scaled_loss:
        scaled_loss.backward()
        weights[2].grad.mul_(1.0)
    assert not gradients.may_be_cleared
    weights[1].grad.zero_()
    assert gradients.may_be_cleared


def test_a_flag_on_the_device_skips_the_step_as_a_whole(amp: ModuleType, gpu: Gpu) -> None:
    for name in ("adamw", "sgd momentum", "lamb"):
        trial = Trial(amp, RULES[name], "O2", 64.0)
        (step,) = [s for o, s in amp.session.optimizers.steps.items() if o is trial.optimizer]
        for seed, flag in enumerate([1.0, 0.0, 2.0, 0.0]):
            before = [master.detach().clone() for master in trial.masters]
            trial.backward(seed, 9, 1.0)
            step.skip.ask_where(torch.tensor([flag]))
            if flag:
                trial.optimizer.step()
                assert amp.step_was_skipped(trial.optimizer)
                assert all(map(torch.equal, trial.masters, before))
                trial.grads = [None] * len(trial.grads)
                trial.check()
            else:
                trial.step(True)


# --- what is kept from step to step ---


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lamb"])
def test_what_is_kept_does_not_grow_with_the_steps(
    amp: ModuleType, place: Place, name: str
) -> None:
    trial = Trial(amp, RULES[name], "O2", 64.0, place.device)
    gc.freeze()  # of a million objects of other tests' imports, none is looked at

    def steps() -> int:
        for seed in range(10):
            trial.step(trial.backward(seed, seed % 7, 1.0))
            # as a load does, and who resets momenta
            for state in trial.optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items()})
        # what is on its way from a GPU, the last flags and scales, is waited for
        assert amp.step_was_skipped(trial.optimizer) is False
        assert amp.loss_scale() == trial.scale
        amp.summary()
        return tensors_alive()

    steps()
    assert steps() <= steps()
    many = [steps() for _ in range(3)]
    assert many == [many[0]] * 3


def test_groups_that_are_gone_are_not_kept(amp: ModuleType, place: Place) -> None:
    trial = Trial(amp, RULES["sgd momentum"], "O2", 64.0, place.device)
    trial.step(trial.backward(0, 9, 1.0))
    group = trial.optimizer.param_groups.pop()
    gone = weakref.ref(trial.optimizer.state[group["params"][0]]["momentum_buffer"])
    for param in group["params"]:
        del trial.optimizer.state[param]
    trial.backward(1, 9, 1.0)
    trial.optimizer.step()
    gc.collect()
    assert gone() is None


def test_the_launches_keep_no_gradient_alive(gpu: Gpu) -> None:
    params = [torch.ones(3), torch.ones(5)]
    optimizer = AdamW(params)
    assert AdamWUpdate.kernels is not None
    step = CudaStep(AdamWUpdate, AdamWUpdate.kernels, LazyGradients())
    for param in params:
        param.grad = torch.ones_like(param)
    grads = [weakref.ref(param.grad) for param in params]
    assert step.step(optimizer, None, None)
    assert gpu.modules.launched == ["adamw_prepare", "adamw_float32_to_float32"]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_model_that_moves_is_trained_where_it_is(
    amp: ModuleType, moment: str, clips: bool
) -> None:
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))

    def train(device: str, elsewhere: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(3, 5).to(device)
        optimizer = AdamW(model.parameters(), lr=LR)
        amp.initialize(
            model, optimizer, opt_level="O5", fused_step=True, loss_scale=1.0, verbosity=0
        )
        for step in range(6):
            moves = {2: elsewhere, 4: device}.get(step)
            if moment == "forward" and moves:
                model.to(moves)
            optimizer.zero_grad()
            with amp.scale_loss(model(inputs.to(model.weight.device)).sum(), optimizer) as scaled:
                scaled.backward()
            if moment == "backward" and moves:
                model.to(moves)
            if clips:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
        masters = [one.detach().cpu() for one in amp.master_params(optimizer)]
        amp.deactivate()
        return masters

    for found, expected in zip(train("cuda", "cpu"), train("cpu", "cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
