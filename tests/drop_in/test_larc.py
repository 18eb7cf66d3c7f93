"""apex.parallel.LARC against its published formula, in float64, and at every level of amp."""

from __future__ import annotations

import copy
import io
import math
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

SHARES_APEX = True
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16}
HALF |= {"O4": torch.bfloat16, "O5": torch.bfloat16}
# One part in 2**10 of fp16 and 2**7 of bf16 at each of four steps; at O2 and O5 the masters are
# fp32, and what is left is the error of the gradients.
TOLERANCE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O3": 5e-3, "O4": 2e-2, "O5": 2e-2}
SUPPRESSED = [HealthCheck.function_scoped_fixture]


def norm_of(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def expected_step(
    param: list[float], grad: list[float], lr: float, decay: float, trust: float, clip: bool
) -> list[float]:
    """One step of SGD with LARC as You, Gitman and Ginsburg have it, number by number."""
    if norm_of(param) != 0 and norm_of(grad) != 0:
        rate = trust * norm_of(param) / (norm_of(grad) + decay * norm_of(param) + 1e-8)
        if clip:
            rate = min(rate / lr, 1.0)
        grad = [rate * (g + decay * p) for p, g in zip(param, grad, strict=True)]
    return [p - lr * g for p, g in zip(param, grad, strict=True)]


NUMBERS = st.floats(-10, 10).map(lambda number: round(number, 3))
VECTORS = st.lists(NUMBERS, min_size=1, max_size=4)


@given(
    st.lists(st.tuples(VECTORS, VECTORS), min_size=1, max_size=3),
    st.sampled_from([0.001, 0.1, 3.0]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.001, 0.02, 1.0]),
    st.booleans(),
)
@settings(suppress_health_check=SUPPRESSED)
def test_a_step_is_the_published_one(
    apex: ModuleType,
    pairs: list[tuple[list[float], list[float]]],
    lr: float,
    decay: float,
    trust: float,
    clip: bool,
) -> None:
    pairs = [(p[: len(g)], g[: len(p)]) for p, g in pairs]
    params = [nn.Parameter(torch.tensor(p, dtype=torch.float64)) for p, _ in pairs]
    for param, (_, grad) in zip(params, pairs, strict=True):
        param.grad = torch.tensor(grad, dtype=torch.float64)
    params.append(nn.Parameter(torch.ones(2)))  # without a gradient
    base = SGD([{"params": [param]} for param in params], lr=lr, weight_decay=decay)
    apex.parallel.LARC(base, trust_coefficient=trust, clip=clip).step()
    for param, (p, grad) in zip(params, pairs, strict=False):
        expected = expected_step(p, grad, lr, decay, trust, clip)
        torch.testing.assert_close(param.tolist(), expected, rtol=1e-12, atol=1e-12)
    assert params[-1].tolist() == [1.0, 1.0]
    assert [group["weight_decay"] for group in base.param_groups] == [decay] * len(params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_of_half_tensors_are_taken_in_fp32(apex: ModuleType, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((9,), 32_768.0, dtype=dtype))
    weight.grad = torch.full((9,), 16_384.0, dtype=dtype)
    apex.parallel.LARC(SGD([weight], lr=1.0), trust_coefficient=0.25).step()
    # |p| is 98,304, beyond fp16, and twice |g|: half of the gradient
    assert weight.tolist() == [32_768.0 - 8_192.0] * 9


def test_the_defaults_are_those_of_apex(apex: ModuleType) -> None:
    larc = apex.parallel.LARC(SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert (larc.trust_coefficient, larc.clip, larc.eps) == (0.02, True, 1e-8)


class Refusing(SGD):
    """Raises in its step."""

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["weight_decay"] == 0
        raise RuntimeError("no step")


def test_weight_decay_is_restored_after_a_step_that_raises(apex: ModuleType) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    larc = apex.parallel.LARC(Refusing([weight], lr=0.1, weight_decay=0.5))
    with pytest.raises(RuntimeError, match="no step"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.5


def test_a_closure_makes_the_gradients_that_are_scaled(apex: ModuleType) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    larc = apex.parallel.LARC(SGD([weight], lr=0.1, weight_decay=0.5), clip=False)

    def closure() -> Tensor:
        larc.zero_grad(set_to_none=False)
        loss = (weight * torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        return loss

    assert larc.step(closure).item() == 11.0
    expected = expected_step([3.0, 4.0], [1.0, 2.0], 0.1, 0.5, 0.02, False)
    torch.testing.assert_close(weight.tolist(), expected)


def test_groups_and_state_are_the_wrapped_optimizers(apex: ModuleType) -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    base = Adam([first], lr=0.5)
    larc = apex.parallel.LARC(optimizer=base)
    assert isinstance(larc, Optimizer)
    assert larc.optim is base
    larc.add_param_group({"params": [second]})
    larc.param_groups[1]["lr"] = 0.25
    first.grad = second.grad = torch.ones(1)
    larc.step()
    assert larc.param_groups is base.param_groups
    assert larc.state is base.state
    assert larc.defaults is base.defaults
    assert larc.state_dict() == base.state_dict()
    assert "Adam" in repr(larc)
    larc.zero_grad()
    assert first.grad is None
    saved = copy.deepcopy(larc.state_dict())
    other = apex.parallel.LARC(Adam([{"params": [first]}, {"params": [second]}], lr=0.1))
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.25]
    assert other.optim.state[first]["exp_avg"] == base.state[first]["exp_avg"]
    other.state, other.param_groups = {}, []
    assert (other.optim.state, other.optim.param_groups) == ({}, [])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_step_parameters_of_their_own(apex: ModuleType, how: str) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    larc = apex.parallel.LARC(SGD([weight], lr=0.1, weight_decay=0.5), 0.5, False, 1e-3)
    torch.optim.lr_scheduler.StepLR(larc, 1)  # leaves on it what cannot be pickled
    if how == "deepcopy":
        twin = copy.deepcopy(larc)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(larc))
    else:
        file = io.BytesIO()
        torch.save(larc, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.5, False, 1e-3)
    (moved,) = twin.param_groups[0]["params"]
    for param, optimizer in ((weight, larc), (moved, twin)):
        param.grad = torch.ones(2)
        optimizer.step()
    assert moved is not weight
    assert torch.equal(moved, weight)


def test_schedulers_and_hooks_take_it_for_an_optimizer(apex: ModuleType) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    larc = apex.parallel.LARC(SGD([weight], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(larc, 1, gamma=0.5)
    called = []
    larc.register_step_pre_hook(lambda optimizer, *_: called.append(optimizer))
    larc.register_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    for _ in range(2):
        weight.grad = torch.ones(2)
        larc.step()
        scheduler.step()
    assert larc.optim.param_groups[0]["lr"] == 0.25
    assert all(one is larc for one in called)
    assert len(called) == 4


def model_and_data() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.randn(12, 6), torch.randn(12, 3)


def expected_training(steps: int) -> list[Tensor]:
    """Train in float64 without amp or torch's optimizers; lr is halved after two steps."""
    model, inputs, targets = model_and_data()
    model.double()
    lr = 0.4
    for step in range(steps):
        model.zero_grad()
        (model(inputs.double()) - targets).square().mean().backward()
        for param in model.parameters():
            flat, grad = param.flatten().tolist(), param.grad.flatten().tolist()
            moved = torch.tensor(expected_step(flat, grad, lr, 0.1, 0.02, True))
            param.data = moved.double().view_as(param)
        lr /= 2 if step == 1 else 1
    return list(model.parameters())


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_around_initialize(
    apex: ModuleType, amp: ModuleType, level: str, order: str
) -> None:
    model, inputs, targets = model_and_data()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.4, weight_decay=0.1)
    if order == "before":
        optimizer = apex.parallel.LARC(optimizer=optimizer, trust_coefficient=0.02)
    scale = None if level in ("O0", "O4", "O5") else 128.0
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0
    )
    if order == "after":
        optimizer = apex.parallel.LARC(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(inputs).float() - targets).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
    assert set(seen) == {HALF.get(level, torch.float32)}
    masters = list(amp.master_params(optimizer))
    half = {"O3": torch.float16}.get(level, torch.float32)
    assert {master.dtype for master in masters} == {half}
    for master, expected in zip(masters, expected_training(4), strict=True):
        torch.testing.assert_close(
            master, expected, rtol=0, atol=TOLERANCE[level], check_dtype=False
        )


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_is_skipped_after_an_overflow(
    apex: ModuleType, amp: ModuleType, level: str, order: str
) -> None:
    model, inputs, _ = model_and_data()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=0.1)
    if order == "before":
        optimizer = apex.parallel.LARC(optimizer)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if order == "after":
        optimizer = apex.parallel.LARC(optimizer)
    before = copy.deepcopy(model.state_dict())
    with amp.scale_loss(model(inputs).float().sum() * math.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_groups_added_later_get_masters(apex: ModuleType, amp: ModuleType) -> None:
    model, inputs, _ = model_and_data()
    optimizer = apex.parallel.LARC(SGD(model[0].parameters(), lr=0.4))
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
    before = model[2].weight.detach().clone()
    with amp.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert {master.dtype for master in amp.master_params(optimizer)} == {torch.float32}
    assert not torch.equal(model[2].weight, before)


def test_two_around_one_optimizer_are_equal_and_others_not(apex: ModuleType) -> None:
    """amp looks up by the optimizer what it did to one."""
    base, other = (SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    larc = apex.parallel.LARC(base)
    assert larc == base
    assert base == larc
    assert larc == apex.parallel.LARC(base)
    assert larc != other
    assert larc != apex.parallel.LARC(other)
    assert {base: 1}[larc] == 1
