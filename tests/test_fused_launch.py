"""fused_step=True from gradient to half weight against float64, by the reference and by kernels.

The kernels run as the CPU runs their text, on tensors that look like a GPU's.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cuda_on_cpu
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kernel_choice import Gpu
from test_optimizers import Lamb
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch.half_gradients import HalfGradients
from amp_patch.lazy_gradients import stored_grad
from amp_patch.optimizers import FusedLAMB

INF = float("inf")
LR = 0.05
SHAPES = [(3, 5), (1,), (17,), (2, 2, 3)]


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
    "adamw lr tensor": Rule(AdamW, "adamw", {"eps": 1e-3}),
    "adam amsgrad": Rule(Adam, "adamw", {"eps": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    "adam maximize": Rule(Adam, "adamw", {"eps": 1e-3, "maximize": True}),
    "sgd": Rule(SGD, "sgd"),
    "sgd momentum": Rule(SGD, "sgd", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd nesterov": Rule(SGD, "sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
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

    def __init__(self, amp: ModuleType, rule: Rule, level: str, scale: float) -> None:
        torch.manual_seed(0)
        self.amp, self.scale = amp, scale
        model = Weights()
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
        given: list[Any] = [torch.randn(p.shape, generator=generator) for p in self.masters]
        if missing < len(given):
            given[missing] = None
        for param in self.model.parameters():
            param.grad = None
        loss = self.model(given) * factor
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
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


@pytest.fixture(params=["torch", "cuda on cpu"])
def launched(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[list[str] | None]:
    """Run all on the reference, or by kernels: then give the names of those launched."""
    if request.param == "torch":
        yield None
        return
    cuda_on_cpu.require_compiler()
    yield Gpu(monkeypatch, pytestconfig).modules.launched


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
    max_size=4,
)


@pytest.mark.parametrize("name", RULES)
def test_any_steps_are_those_of_float64(
    amp: ModuleType, launched: list[str] | None, name: str
) -> None:
    rule = RULES[name]
    kept = Trial(amp, rule, "O2", 1.0)  # torch stays patched while it lives

    @given(steps=STEPS, level=st.sampled_from(["O2", "O5"]), scale=st.sampled_from([1.0, 2.0**10]))
    def run(steps: list[dict[str, Any]], level: str, scale: float) -> None:
        trial = Trial(amp, rule, level, scale)
        if name == "adamw lr tensor":
            for group in trial.optimizer.param_groups:
                group["lr"] = torch.tensor(LR)
        for options in steps:
            clip, reads = options["clip"], options["reads"]
            inputs = {key: options[key] for key in ("seed", "missing", "factor")}
            # a loss that is not finite is found by its scaled gradients only where it is checked
            inputs["factor"] = options["factor"] if scale != 1.0 else 1.0
            is_finite = trial.backward(**inputs)
            if launched is not None and is_finite:
                assert isinstance(trial_source(trial), HalfGradients)
            if is_finite and clip is not None:
                trial.clip(clip)
            if is_finite and reads:
                trial.double_gradients()
            trial.step(is_finite)

    run()
    del kept
    if launched is not None:
        kernels = {one for one in launched if one.startswith(rule.source)}
        assert len(kernels) >= 3


def trial_source(trial: Trial) -> Any:
    (step,) = [s for o, s in trial.amp.session.optimizers.steps.items() if o is trial.optimizer]
    return step._fused.lazy.source
