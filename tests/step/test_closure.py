"""A step with a closure: as in fp32, and as a whole or not at all."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_training import (
    LEVELS,
    OPTIMIZERS,
    assert_unchanged,
    everything,
    linear,
    prepared,
    train_step,
)
from support import scaled_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam, Optimizer

from amp_patch.step.closure import StateBeforeStep, evaluates_first

F16, F32 = torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


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


CLOSURE_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    **OPTIMIZERS,
    "two evaluations": TwoEvaluations,
    "lbfgs": lambda params: LBFGS(params, lr=0.25, max_iter=2),
}


def closure_of(
    amp: ModuleType, model: nn.Module, optimizer: Optimizer, factors: list[float]
) -> Callable[[], Tensor]:
    """Return a closure that multiplies its n-th loss by the n-th factor."""
    evaluations = iter(factors)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean() * next(evaluations)
        scaled_backward(amp, loss, optimizer)
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


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O3"])
def test_lbfgs_searches_along_a_line_as_in_fp32(
    amp: ModuleType, level: str, line_search: str | None
) -> None:
    """Each evaluation computes with what the search tries; at O2 and O5 these are masters.

    O3 steps half weights: products of its history leave float16's range.
    """

    def train(level: str | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(32, 2)
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=8, line_search_fn=line_search)
        if level is not None:
            amp.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x).float() - x.sum(1, keepdim=True).sin()).square().mean()
            if level is None:
                loss.backward()
            else:
                scaled_backward(amp, loss, optimizer)
            return loss.detach()  # LBFGS makes a number of it

        return [float(optimizer.step(closure)) for _ in range(4)]

    expected = train(None)
    found = train(level)
    assert found == pytest.approx(expected, rel=0.05, abs=0.002)
    assert found[-1] < 0.1 * found[0]


@pytest.mark.parametrize("make", [SGD, TwoEvaluations])
@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_may_clear_between_its_forward_and_its_backward(
    amp: ModuleType, level: str, make: Callable[..., Optimizer]
) -> None:
    """As Lightning's does; the backward needs the weights that the forward has saved."""

    def train(level: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        optimizer = make(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.125
        if level is not None:
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0
            )

        def closure() -> Tensor:
            loss = model(torch.ones(2, 4)).float().square().mean()
            optimizer.zero_grad()
            if level is None:
                loss.backward()
            else:
                scaled_backward(amp, loss, optimizer)
            return loss

        return [optimizer.step(closure).detach() for _ in range(3)]

    torch.testing.assert_close(train(level), train(None), rtol=0.05, atol=0.01)


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
        ("lbfgs", [NAN, 1.0]),
        ("lbfgs", [1.0, INF]),
    ],
)
def test_a_closure_that_is_not_finite_leaves_all_as_before(
    amp: ModuleType, level: str, make: str, factors: list[float]
) -> None:
    model, optimizer = prepared(amp, level, CLOSURE_OPTIMIZERS[make])
    optimizer.step(closure_of(amp, model, optimizer, [1.0, 1.0]))
    before = everything(model, optimizer)
    options = [dict(group, params=None) for group in optimizer.param_groups]
    optimizer.step(closure_of(amp, model, optimizer, factors))
    assert amp.step_was_skipped(optimizer)
    assert_unchanged(model, optimizer, before)
    assert [dict(group, params=None) for group in optimizer.param_groups] == options
    optimizer.step(closure_of(amp, model, optimizer, [1.0, 1.0]))
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("make", ["sgd", "two evaluations", "lbfgs"])
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_step_returns_what_its_closure_did_also_where_it_is_skipped(
    amp: ModuleType, level: str, factor: float
) -> None:
    model, optimizer = prepared(amp, level)
    returned: list[Tensor] = []
    closure = closure_of(amp, model, optimizer, [factor])

    def keep() -> Tensor:
        returned.append(closure())
        return returned[-1]

    assert optimizer.step(keep) is returned[0]
    assert amp.step_was_skipped(optimizer) == (factor == INF)


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
        scaled_backward(amp, loss, optimizer, delay_unscale=True)
        return loss

    with pytest.raises(RuntimeError, match=r"^optimizer.step\(closure\) needs unscaled gradients"):
        optimizer.step(closure)


@pytest.mark.parametrize("level", LEVELS)
def test_a_closure_ends_an_accumulation(amp: ModuleType, level: str) -> None:
    """Lightning calls the last backward so, after micro-batches under ``no_sync()``."""
    model, optimizer = prepared(amp, level)
    before = [master.detach().clone().float() for master in amp.master_params(optimizer)]

    def add(factor: float, **options: bool) -> Tensor:
        loss = model(torch.ones(2, 4)).float().sum() * factor
        scaled_backward(amp, loss, optimizer, **options)
        return loss

    add(0.25, delay_unscale=True)
    optimizer.step(lambda: add(0.5))

    (lr,) = (group["lr"] for group in optimizer.param_groups)
    expected = [was - lr * (0.25 + 0.5) * 2.0 for was in before]  # of two rows of ones
    for master, value in zip(amp.master_params(optimizer), expected, strict=True):
        torch.testing.assert_close(
            master.detach().float(), value.expand_as(master), atol=2e-2, rtol=0.0
        )


@pytest.mark.parametrize("make", ["sgd", "two evaluations"])
def test_what_a_closure_writes_to_half_weights_is_stepped_from(amp: ModuleType, make: str) -> None:
    model, optimizer = prepared(amp, make=CLOSURE_OPTIMIZERS[make])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight.float() * 0.0).sum()
        scaled_backward(amp, loss, optimizer)
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


# --- what a step may change before its closure says that it is skipped ---


def test_the_state_before_a_step_comes_back_whole() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = SGD([param], lr=0.5, momentum=0.5)
    before = StateBeforeStep(optimizer, [param])
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 2.0
    before.restore()
    assert param.tolist() == [1.0, 1.0]
    assert dict(optimizer.state) == {}
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    before = StateBeforeStep(optimizer, [param])
    buffer.fill_(7.0)
    before.restore()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0, 1.0]


def test_only_optimizers_that_evaluate_first_need_no_copy() -> None:
    params = [nn.Parameter(torch.ones(2))]
    assert evaluates_first(Adam(params))
    assert not evaluates_first(TwoEvaluations(params))
    assert not evaluates_first(LBFGS(params))
