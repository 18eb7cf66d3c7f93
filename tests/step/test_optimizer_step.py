"""An optimizer's step: skipped as if it had never been called, with closures, copied, freed."""

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

F16, F32 = torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
EPS = 1e-3  # the default is 0 in fp16, in which O3 steps
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.125, momentum=0.5),
    "adam fused": lambda params: Adam(params, lr=0.125, eps=EPS, fused=True),
    "adam foreach": lambda params: Adam(params, lr=0.125, eps=EPS, foreach=True),
    "adam loop": lambda params: Adam(params, lr=0.125, eps=EPS, foreach=False),
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def prepared(
    amp: ModuleType, level: str = "O2", make: Callable[..., Optimizer] | None = None, **options: Any
) -> tuple[nn.Module, Optimizer]:
    model = linear()
    optimizer = (make or OPTIMIZERS["sgd"])(model.parameters())
    return amp.initialize(
        model, optimizer, opt_level=level, **{"loss_scale": 16.0, "verbosity": 0, **options}
    )


def backward(
    amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0, seed: int = 0
) -> None:
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    loss = model(inputs).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


def train_step(
    amp: ModuleType, model: nn.Module, optimizer: Any, factor: float = 1.0, seed: int = 0
) -> None:
    optimizer.zero_grad()
    backward(amp, model, optimizer, factor, seed)
    optimizer.step()


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all that a step changes."""
    tensors = [*model.parameters(), *model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def assert_unchanged(model: nn.Module, optimizer: Optimizer, before: list[Tensor]) -> None:
    after = everything(model, optimizer)
    assert len(after) == len(before)
    for new, old in zip(after, before, strict=True):
        assert new.dtype is old.dtype
        assert torch.equal(new, old)


# --- skipped steps ---


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_skipped_step_changes_nothing(amp: ModuleType, level: str, make: str, bad: float) -> None:
    model, optimizer = prepared(amp, level, OPTIMIZERS[make])
    train_step(amp, model, optimizer)
    before = everything(model, optimizer)
    train_step(amp, model, optimizer, bad)
    assert amp.step_was_skipped(optimizer)
    assert_unchanged(model, optimizer, before)
    train_step(amp, model, optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert not torch.equal(everything(model, optimizer)[0], before[0])


def test_a_skipped_first_step_makes_no_state(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, make=OPTIMIZERS["adam loop"])
    train_step(amp, model, optimizer, INF)
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("make", ["sgd", "adam fused"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_bad_batches_leave_no_trace(amp: ModuleType, level: str, make: str) -> None:
    kept = prepared(amp, level, OPTIMIZERS[make])  # torch stays patched while it lives

    @given(st.lists(st.sampled_from([1.0, 1.0, INF, NAN]), max_size=8))
    def run(factors: list[float]) -> None:
        model, optimizer = prepared(amp, level, OPTIMIZERS[make])
        reference, reference_optimizer = prepared(amp, level, OPTIMIZERS[make])
        for seed, factor in enumerate(factors):
            train_step(amp, model, optimizer, factor, seed)
            if factor == 1.0:
                train_step(amp, reference, reference_optimizer, seed=seed)
        assert_unchanged(model, optimizer, everything(reference, reference_optimizer))

    run()
    del kept


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_bad_micro_batch_skips_the_accumulated_step(
    amp: ModuleType, level: str, which: int
) -> None:
    model, optimizer = prepared(amp, level)
    before = everything(model, optimizer)
    for i in range(3):
        backward(amp, model, optimizer, INF if i == which else 1.0)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_unchanged(model, optimizer, before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_the_overflow_with_the_gradients(
    amp: ModuleType, set_to_none: bool
) -> None:
    model, optimizer = prepared(amp)
    backward(amp, model, optimizer, INF)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(amp, model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


def test_a_skipped_step_returns_none_and_runs_no_step_hook(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    backward(amp, model, optimizer, INF)
    assert optimizer.step() is None
    assert calls == []


def test_masters_gradients_go_with_the_step(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    for factor in (1.0, INF):
        backward(amp, model, optimizer, factor)
        optimizer.step()
        assert [master.grad for master in amp.master_params(optimizer)] == [None, None]


def test_step_passes_arguments_and_result_on(amp: ModuleType) -> None:
    class Talking(SGD):
        def step(self, closure: None = None, *, note: str = "") -> str:
            super().step()
            return f"stepped {note}"

    _, optimizer = prepared(amp, make=lambda params: Talking(params, lr=0.125))
    assert optimizer.step(note="well") == "stepped well"


def test_an_error_in_the_step_leaves_the_model_equal_to_its_masters(amp: ModuleType) -> None:
    class Failing(SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            self.param_groups[0]["params"][0].fill_(0.75)
            raise ArithmeticError("step")

    model, optimizer = prepared(amp, make=lambda params: Failing(params, lr=0.125))
    with pytest.raises(ArithmeticError, match="step"):
        optimizer.step()
    assert torch.equal(model.weight, torch.full((3, 4), 0.75, dtype=F16))


# --- misuse ---


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_scale_loss_is_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    before = everything(model, optimizer)
    message = (
        r"^optimizer.step\(\) needs unscaled gradients, which there are from the end of a "
        r"scale_loss\(\) block on; got a call inside the block. Move it behind the block.$"
    )
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match=message):  # noqa: PT012, SIM117
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
    assert_unchanged(model, optimizer, before)
    train_step(amp, model, optimizer)


@pytest.mark.parametrize("call", ["step", "clip"])
def test_scaled_gradients_are_refused(amp: ModuleType, call: str) -> None:
    model, optimizer = prepared(amp)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    caller = {"step": "optimizer.step()", "clip": "amp.clip_grad_norm_()"}[call]
    message = (
        f"{caller} needs unscaled gradients; the last scale_loss(..., delay_unscale=True) left "
        "them scaled. Leave delay_unscale out in the last scale_loss() before it, or clear them "
        "with optimizer.zero_grad()."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        optimizer.step() if call == "step" else amp.clip_grad_norm_(optimizer, 1.0)
    optimizer.zero_grad()
    train_step(amp, model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_lbfgs_is_refused(amp: ModuleType, level: str) -> None:
    model = linear()
    message = (
        "optimizers must evaluate the loss before they change anything; got LBFGS, whose line "
        "search evaluates it between changes, where a step that is not finite cannot be skipped. "
        "Train with LBFGS in float32, without amp.initialize()."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        amp.initialize(model, LBFGS(model.parameters()), opt_level=level, verbosity=0)
    assert model.weight.dtype is F32


# --- closures ---


class TwoEvaluations(Optimizer):
    """Walks along the gradient, evaluates there, and steps by both: changes, then evaluates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.125, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad
                param.sub_(param.grad, alpha=group["lr"])
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])
        return loss


CLOSURE_OPTIMIZERS = {**OPTIMIZERS, "two evaluations": TwoEvaluations}


def closure_of(
    amp: ModuleType, model: nn.Module, optimizer: Optimizer, factors: list[float]
) -> Callable[[], Tensor]:
    """Return a closure that multiplies its n-th loss by the n-th factor."""
    evaluations = iter(factors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean() * next(evaluations)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    return closure


#: Adam's second moments are no more than noise in fp16.
CLOSE_TO_FP32 = [
    (level, make)
    for level in LEVELS
    for make in CLOSURE_OPTIMIZERS
    if level != "O3" or not make.startswith("adam")
]


@pytest.mark.parametrize(("level", "make"), CLOSE_TO_FP32)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_steps_as_in_fp32(amp: ModuleType, level: str, make: str, by_name: bool) -> None:
    reference = linear()
    reference_optimizer = CLOSURE_OPTIMIZERS[make](reference.parameters())

    def plain() -> Tensor:
        reference_optimizer.zero_grad()
        loss = reference(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    model, optimizer = prepared(amp, level, CLOSURE_OPTIMIZERS[make])
    for _ in range(3):
        expected = reference_optimizer.step(plain)
        closure = closure_of(amp, model, optimizer, [1.0, 1.0])
        result = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.01)
    for param, goal in zip(amp.master_params(optimizer), reference.parameters(), strict=True):
        tolerance = 1e-6 if level == "O0" else 0.04
        torch.testing.assert_close(param.float(), goal, rtol=tolerance, atol=tolerance)
    assert not amp.step_was_skipped(optimizer)


def test_masters_are_published_before_each_evaluation(amp: ModuleType) -> None:
    model, optimizer = prepared(amp, make=TwoEvaluations)
    seen = []

    def closure() -> Tensor:
        seen.append((model.weight.detach().clone(), next(amp.master_params(optimizer)).clone()))
        return closure_of(amp, model, optimizer, [1.0])()

    optimizer.step(closure)
    assert len(seen) == 2
    for half, master in seen:
        assert torch.equal(half, master.half())
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("make", "factors"),
    [
        ("sgd", [INF]),
        ("adam fused", [NAN]),
        ("adam foreach", [-INF]),
        ("two evaluations", [NAN, 1.0]),
        ("two evaluations", [1.0, INF]),
    ],
)
def test_a_closure_that_is_not_finite_leaves_all_as_before(
    amp: ModuleType, level: str, make: str, factors: list[float]
) -> None:
    model, optimizer = prepared(amp, level, CLOSURE_OPTIMIZERS[make])
    optimizer.step(closure_of(amp, model, optimizer, [1.0, 1.0]))
    before = everything(model, optimizer)
    options = [dict(group, params=None) for group in optimizer.param_groups]
    assert optimizer.step(closure_of(amp, model, optimizer, factors)) is None
    assert amp.step_was_skipped(optimizer)
    assert_unchanged(model, optimizer, before)
    assert [dict(group, params=None) for group in optimizer.param_groups] == options
    optimizer.step(closure_of(amp, model, optimizer, [1.0, 1.0]))
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("make", ["sgd", "two evaluations"])
def test_a_closures_loss_is_looked_at_where_gradients_are_finite(
    amp: ModuleType, capsys: pytest.CaptureFixture[str], make: str
) -> None:
    model, optimizer = prepared(amp, make=CLOSURE_OPTIMIZERS[make], verbosity=1)
    before = everything(model, optimizer)
    capsys.readouterr()

    def closure() -> Tensor:
        return closure_of(amp, model, optimizer, [1.0])() + INF

    optimizer.step(closure)
    assert_unchanged(model, optimizer, before)
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, the closure returned a loss that is not finite\n"
    )


def test_a_closure_may_return_anything(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)

    def closure() -> None:
        closure_of(amp, model, optimizer, [1.0])()

    assert optimizer.step(closure) is None
    assert not amp.step_was_skipped(optimizer)


def test_an_error_in_a_closure_reaches_the_caller(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    before = everything(model, optimizer)

    def closure() -> Tensor:
        raise ArithmeticError("closure")

    with pytest.raises(ArithmeticError, match="closure"):
        optimizer.step(closure)
    assert_unchanged(model, optimizer, before)
    train_step(amp, model, optimizer)


def test_a_closure_that_leaves_gradients_scaled_is_refused(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)

    def closure() -> Tensor:
        loss = model(torch.ones(2, 4)).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"^optimizer.step\(closure\) needs unscaled gradients"):
        optimizer.step(closure)


@pytest.mark.parametrize("make", ["sgd", "two evaluations"])
def test_what_a_closure_writes_to_half_weights_is_stepped_from(amp: ModuleType, make: str) -> None:
    model, optimizer = prepared(amp, make=CLOSURE_OPTIMIZERS[make])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight.float() * 0.0).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        model.weight.data.fill_(0.5)
        model.bias.grad = None
        return loss

    for param in model.parameters():
        param.requires_grad_(param is model.weight)
    optimizer.param_groups[0]["params"].pop()
    optimizer.step(closure)
    assert torch.equal(model.weight, torch.full((3, 4), 0.5, dtype=F16))
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 4), 0.5))


def test_casts_are_on_in_a_closure_and_off_in_the_step(amp: ModuleType) -> None:
    seen: dict[str, torch.dtype] = {}

    class Watching(SGD):
        def step(self, closure: Any = None) -> Any:
            seen["before"] = F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype
            with torch.enable_grad():
                loss = closure()
            seen["after"] = F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype
            return loss

    model, optimizer = prepared(amp, "O1", lambda params: Watching(params, lr=0.125))

    def closure() -> Tensor:
        seen["closure"] = F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype
        return torch.zeros(())

    optimizer.step(closure)
    assert seen == {"before": F32, "closure": F16, "after": F32}


# --- step hooks of users ---


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_see_the_weights_just_stepped(amp: ModuleType, level: str, when: str) -> None:
    model = linear()
    optimizer, seen = SGD(model.parameters(), lr=0.125), []

    def note(*_: Any) -> None:
        seen.append((model.weight.detach().clone(), model.state_dict()["weight"].clone()))

    if when == "before":
        optimizer.register_step_post_hook(note)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    if when == "after":
        optimizer.register_step_post_hook(note)
    for seed in range(2):
        train_step(amp, model, optimizer, seed=seed)
        half, exact = seen[-1]
        assert torch.equal(half, model.weight)
        assert torch.equal(exact, model.state_dict()["weight"])
    assert not torch.equal(seen[0][0], seen[1][0])


def test_a_step_hook_may_write_to_half_weights(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    optimizer.register_step_post_hook(lambda *_: model.weight.data.clamp_(-0.125, 0.125))
    for seed in range(3):
        train_step(amp, model, optimizer, seed=seed)
        assert model.weight.abs().max().item() <= 0.125
        assert model.state_dict()["weight"].abs().max().item() <= 0.125


# --- learning-rate schedulers ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("first", [1.0, INF])
def test_schedulers_see_every_step_without_a_warning(
    amp: ModuleType, level: str, built: str, first: float
) -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    schedulers = [StepLR(optimizer, 1, 0.5)] if built == "before" else []
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    if built == "after":
        schedulers = [StepLR(optimizer, 1, 0.5), LambdaLR(optimizer, lambda _: 1.0)][:1]
    for factor in (first, 1.0):
        train_step(amp, model, optimizer, factor)
        schedulers[0].step()  # a warning would be an error
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("built", ["before", "after"])
def test_a_schedulers_optimizer_steps_plainly_after_deactivate(
    amp: ModuleType, level: str, built: str
) -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    schedulers = [StepLR(optimizer, 1, 0.5)] if built == "before" else []
    amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    schedulers += [StepLR(optimizer, 1, 0.5)] if built == "after" else []
    train_step(amp, model, optimizer)
    schedulers[0].step()
    amp.deactivate()
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    schedulers[0].step()
    assert torch.equal(model.weight, before - 0.5 * 2.0)
    assert optimizer.param_groups[0]["lr"] == 0.25


# --- copies, pickles, freeing ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_optimizer_is_a_plain_one_with_the_same_values(
    amp: ModuleType, level: str, how: Callable[[Optimizer], Optimizer]
) -> None:
    model, optimizer = prepared(amp, level, lambda params: AdamW(params, lr=0.125))
    train_step(amp, model, optimizer)
    twin = how(optimizer)
    assert type(twin) is AdamW
    assert not {"step", "zero_grad", "add_param_group"} & set(vars(twin))
    before = everything(model, optimizer)
    for ours, theirs in zip(
        optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(ours, theirs)
        assert torch.equal(optimizer.state[ours]["exp_avg"], twin.state[theirs]["exp_avg"])
        theirs.grad = torch.ones_like(theirs)
    twin.step()
    assert_unchanged(model, optimizer, before)
    train_step(amp, model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("delay_overflow_check", [False, True])
def test_a_dropped_optimizer_is_freed_at_once(
    amp: ModuleType, level: str, delay_overflow_check: bool
) -> None:
    model, optimizer = prepared(amp, level)
    with amp.scale_loss(
        model(torch.ones(2, 4)).sum(), optimizer, delay_overflow_check=delay_overflow_check
    ) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    dead = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert dead() is None
    finally:
        gc.enable()
    amp.deactivate()
    assert model(torch.ones(2, 4)).dtype is F32


def test_deactivate_leaves_nothing_on_the_optimizer(amp: ModuleType) -> None:
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.125)
    before = set(vars(optimizer))
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.deactivate()
    assert set(vars(optimizer)) == before
    assert not optimizer._optimizer_step_post_hooks
