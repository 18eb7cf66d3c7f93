"""The cause of an overflow is named, with what mends it; and training goes on as without."""

from __future__ import annotations

import copy
import gc
import inspect
import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from plants import (
    WIDTH,
    Exponential,
    Large,
    Looked,
    OwnFunction,
    RootOfZero,
    Scores,
    around,
    prepared,
    square,
    the_cause,
    train,
)
from support import scaled_backward, trains
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from amp_patch.debug.cause import Cause
from amp_patch.debug.recorded_calls import Call
from amp_patch.debug.trace import tracer
from amp_patch.debug.watch import Counts
from amp_patch.session import session
from amp_patch.step.observers import StepObserver
from amp_patch.step.skip import Skip

HALF_LEVELS = ("O1", "O2", "O3")


PLANTS = {
    "linear": (Large, "proj", "linear", "forward"),
    "scores": (Scores, "", "matmul", "forward"),
    "root": (RootOfZero, "", "sqrt", "backward"),
    "embedding": (Looked, "", "add", "forward"),
    "function": (OwnFunction, "", "Overflowing", "backward"),
}


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize("kind", PLANTS)
def test_the_module_and_the_operator_are_named(amp, kind: str, level: str) -> None:
    plant, inner, operator, where = PLANTS[kind]
    model, optimizer = prepared(amp, around(plant()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    path = "1.1" + (f".{inner}" if inner else "")
    assert (cause.where, cause.module, cause.operator) == (where, path, operator)
    assert amp.step_was_skipped(optimizer)


LINES = {
    "linear": (Large, "return self.proj(x.abs() + 1.0) * 1e-6"),
    "scores": (Scores, "return torch.softmax(q @ k.transpose(0, 1), -1) @ x"),
    "root": (RootOfZero, "return y + torch.sqrt((y * 0.0).square().sum(-1, keepdim=True))"),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", LINES)
def test_the_line_that_calls_the_operator_is_shown(
    amp, monkeypatch: pytest.MonkeyPatch, kind: str, is_checkpointed: bool, level: str
) -> None:
    plant, text = LINES[kind]
    code, number = inspect.getsourcelines(plant.forward)
    number += next(index for index, line in enumerate(code) if line.strip() == text)
    file = Path(inspect.getfile(plant))
    monkeypatch.chdir(file.parent)
    inner = Checkpointed(plant()) if is_checkpointed else plant()
    model, optimizer = prepared(amp, around(inner), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert cause.line == f"{file.name}:{number}: {text}"
    assert f"\n  line: {cause.line}\n" in str(cause)


def test_layers_of_torch_alone_have_no_line(amp) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight.data.fill_(60000.0)
    model, optimizer = prepared(amp, model, "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.operator, cause.line) == ("1", "linear", "")
    assert "line:" not in str(cause)


def test_a_file_outside_of_the_working_directory_is_named_by_its_whole_path(
    amp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = prepared(amp, around(Scores()), "O1")
    train(amp, model, optimizer)
    assert the_cause(amp).line.startswith(f"{inspect.getfile(Scores)}:")


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.module, x, use_reentrant=False)


def test_a_line_is_told_where_the_working_directory_is_gone(
    amp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    model, optimizer = prepared(amp, around(Scores()), "O1")
    gone.rmdir()
    train(amp, model, optimizer)
    assert the_cause(amp).line.startswith(f"{inspect.getfile(Scores)}:")


def test_the_line_in_the_backward_of_a_function_of_the_users_is_shown(amp) -> None:
    model, optimizer = prepared(amp, around(OwnFunction()), "O1")
    train(amp, model, optimizer)
    assert the_cause(amp).operator == "Overflowing"
    assert the_cause(amp).line.endswith(": return grad * torch.inf")


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_an_exponential_is_named(amp, level: str) -> None:
    # O1 computes it in float32, unless a rule of the user's says otherwise
    rules = {"rules": {"exp": "half"}} if level == "O1" else {}
    model, optimizer = prepared(amp, around(Exponential()), level, **rules)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.operator, cause.dtype) == ("1.1", "exp", "float16")
    assert cause.result.kinds == ("inf",)
    assert cause.operands[0].largest == 20.0
    assert cause.mended_by == "module"
    assert "float_region" in cause.advice()
    assert ('rules={"exp": "float"}' in cause.advice()) == (level == "O1")


class InRegion(nn.Module):
    def __init__(self, amp: Any, module: nn.Module) -> None:
        super().__init__()
        self.amp, self.module = amp, module

    def forward(self, x: Tensor) -> Tensor:
        with self.amp.float_region():
            return self.module(x).to(x.dtype)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("plant", [Scores, Exponential])
def test_the_region_that_is_advised_mends_it(amp, plant: type[nn.Module], level: str) -> None:
    model, optimizer = prepared(amp, around(InRegion(amp, plant())), level)
    train(amp, model, optimizer)
    assert not amp.overflow_report()


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_what_float32_does_not_mend_is_told_apart(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(RootOfZero()), level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert cause.mended_by == "nothing"
    assert "float32 does not help" in cause.advice()


class Amplifying(nn.Module):
    """Saves activations that are far larger than any gradient, and that no scale multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.exp(torch.tanh(x).to(x.dtype)) * 4000.0).relu() / 4000.0


@pytest.mark.parametrize("plant", [nn.Tanh, Amplifying])
@pytest.mark.parametrize("level", HALF_LEVELS)
def test_the_loss_scale_is_told_from_the_model(amp, level: str, plant: Any) -> None:
    scale = {"loss_scale": "dynamic" if level != "O3" else 65536.0}
    model, optimizer = prepared(amp, around(plant()), level, **scale)
    train(amp, model, optimizer, lambda outputs: square(outputs + 30.0) * 100.0)
    cause = the_cause(amp)
    assert cause.is_loss_scale
    assert "only the loss scale" in cause.advice()
    told = f"loss_scale={cause.fits:g}), or give" if level == "O3" else "comes there by itself"
    assert told in cause.advice()
    # the scale that is said to fit fits, and twice that does not, from the same weights
    amp.deactivate()
    for factor, overflows in ((1.0, False), (2.0, True)):
        torch.manual_seed(0)
        options = {"loss_scale": cause.fits * factor}
        model, optimizer = prepared(amp, around(plant()), level, **options)
        train(amp, model, optimizer, lambda outputs: square(outputs + 30.0) * 100.0)
        assert bool(amp.overflow_report()) == overflows
        amp.deactivate()


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_loss_that_is_not_finite_is_outside_of_the_model(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, lambda outputs: square(outputs) * torch.inf)
    cause = the_cause(amp)
    assert (cause.where, cause.module) == ("loss", "")
    assert "outside of the model" in cause.title()


@pytest.mark.parametrize("level", HALF_LEVELS)
def test_a_loss_whose_backward_is_not_finite_is_named_by_its_operator(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, lambda outputs: (outputs.float() * 0.0).square().sum().sqrt())
    cause = the_cause(amp)
    assert (cause.where, cause.operator) == ("loss", "sqrt")


def test_the_model_of_several_is_said(amp) -> None:
    generator, critic = around(nn.Tanh(), 0, 0), around(Scores(), 1, 0)
    optimizers = [SGD(one.parameters(), lr=0.01) for one in (generator, critic)]
    (generator, critic), optimizers = amp.initialize(
        [generator, critic],
        optimizers,
        opt_level="O1",
        verbosity=0,
        loss_scale=8.0,
        num_losses=2,
        trace_overflow=True,
    )
    fake = generator(torch.randn(4, WIDTH))
    with amp.scale_loss(square(critic(fake.detach())), optimizers[1], loss_id=1) as scaled:
        scaled.backward()
    optimizers[1].step()
    cause = the_cause(amp)
    assert (cause.model, cause.module) == ("Sequential 2", "1.1")
    # the generator's gradient comes through the critic
    with amp.scale_loss(square(critic(fake)), optimizers[0], loss_id=0) as scaled:
        scaled.backward()
    assert the_cause(amp).model == "Sequential 2"
    report = amp.overflow_report()
    assert [one.scaler_id for one in report.overflows] == [0, 1]
    assert report.overflows[0].params[0].name.startswith("Sequential 1: 0.0")
    assert report.overflows[1].params[0].name.startswith("Sequential 2: 0.0")


@pytest.mark.parametrize("graph", ["none", "dropped", "detached", "kept"])
def test_what_another_model_handed_on_is_looked_for_there(amp, graph: str) -> None:
    first, generator = around(nn.BatchNorm1d(WIDTH), 0, 0), around(RootOfZero(), 0, 0)
    with torch.no_grad():
        generator[0][1].proj.weight[0, 0] = torch.nan
    critic = around(nn.Tanh(), 0, 0)
    models = [first, generator, critic]
    optimizers = [SGD(one.parameters(), lr=0.01) for one in models]
    models, optimizers = amp.initialize(
        models, optimizers, opt_level="O1", verbosity=0, loss_scale=8.0, trace_overflow=True
    )
    first, generator, critic = models
    for _ in range(2):
        with torch.set_grad_enabled(graph != "none"):
            fake = generator(first(torch.randn(4, WIDTH)))
        if graph == "dropped":
            fake = fake.detach()
        statistics = first[0][1].running_mean.clone()
        given = torch.cat([fake if graph == "kept" else fake.detach(), torch.zeros(4, WIDTH)])
        with amp.scale_loss(square(critic(given)), optimizers[2]) as scaled:
            scaled.backward()
        assert torch.equal(first[0][1].running_mean, statistics)  # by no second run
        optimizers[2].step()
    cause = the_cause(amp)
    assert (cause.where, cause.model) == ("weight", "Sequential 2")
    assert (cause.module, cause.operator) == ("0.1.proj", "weight")
    assert ("Sequential 3 was given it" in cause.note) == (graph != "kept")
    del fake, given, scaled
    assert tracer.recorded.kept() == []  # they go with the graph, or the step


def test_a_model_that_runs_without_gradients_first_is_run_again_as_it_was(amp) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), RootOfZero())
    model, optimizer = prepared(amp, model, "O1")
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))  # changes no buffer
    model.train()
    outputs = model(torch.randn(4, WIDTH))
    changed = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(tracer.recorded.kept()[-1].state.buffers) == changed
    del outputs


@hypothesis.given(
    before=st.integers(0, 4), after=st.integers(0, 4), level=st.sampled_from(["O1", "O2"])
)
@trains()
def test_the_plant_is_found_at_any_depth(before: int, after: int, level: str) -> None:
    from amp_patch import amp

    try:
        model, optimizer = prepared(amp, around(Scores(), before, after), level)
        train(amp, model, optimizer)
        assert the_cause(amp).module == f"{before}.1"
    finally:
        amp.deactivate()


class Noisy(nn.Module):
    """What a second run must put back: random numbers, buffers, attributes."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("none", None)
        self.register_buffer("first", torch.zeros(1))
        self.calls = 0
        self.last: Tensor | None = None
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._buffers.pop("first", None)
        y = self.body(x)
        self.average.lerp_(y.detach().mean(0).to(self.average.dtype), 0.1)
        self.last = y
        if self.recompute is None:
            return self.head(y) * self.average
        return checkpoint(self.head, y, use_reentrant=self.recompute) * self.average


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_goes_on_bit_for_bit(amp, level: str, recompute: bool | None) -> None:
    torch.manual_seed(0)
    original = Noisy(recompute)
    states, skips = [], []
    for trace in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(original)
        options = {"trace_overflow": trace, "loss_scale": "dynamic"}
        model, optimizer = prepared(amp, model, level, **options)
        skipped = 0
        for step in range(12):
            factor = torch.inf if step == 10 else 1000.0

            def loss_of(outputs: Tensor, model=model, factor=factor) -> Tensor:
                model.body[1].running_mean.data.add_(0.1)  # after the forward
                return square(outputs) * factor * (1.0 + torch.rand(()))

            train(amp, model, optimizer, loss_of)
            skipped += amp.step_was_skipped(optimizer)
        causes = amp.overflow_report().causes
        assert bool(causes) == trace
        assert not any(cause.where == "unknown" for cause, _ in causes)
        grads = [param.grad for param in model.parameters()]
        states.append(([*model.state_dict().values(), *grads, torch.get_rng_state()], model.calls))
        skips.append(skipped)
        amp.deactivate()
    assert 1 < skips[0] == skips[1] < 11
    assert states[0][1] == states[1][1] == 12
    for plain, traced in zip(states[0][0], states[1][0], strict=True):
        assert (plain is None) == (traced is None)
        if plain is not None:
            torch.testing.assert_close(traced, plain, rtol=0, atol=0, equal_nan=True)


class Momentum(nn.Module):
    """Its second encoder follows the first in the forward; its noise has a generator of its own."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.encoder, self.following = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.following.requires_grad_(False)
        self.generator = torch.Generator().manual_seed(0)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.encoder.parameters(), self.following.parameters(), strict=True)
            for param, follower in pairs:
                if self.in_place:
                    follower.lerp_(param, 0.1)
                else:
                    follower.data = follower.data * 0.9 + param.data * 0.1
        noise = torch.randn(x.shape, generator=self.generator).to(x.dtype)
        return self.encoder(x + noise) * self.following(x)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_and_noise_of_a_forward_go_on_as_without(amp, level: str, in_place: bool) -> None:
    states = []
    for trace in (False, True):
        torch.manual_seed(0)
        options = {"trace_overflow": trace, "loss_scale": "dynamic"}
        model, optimizer = prepared(amp, Momentum(in_place), level, **options)
        train(amp, model, optimizer, lambda outputs: square(outputs) * 1000.0, steps=14)
        assert bool(amp.overflow_report().causes) == trace
        assert not amp.step_was_skipped(optimizer)
        states.append([param.detach().clone() for param in model.parameters()])
        amp.deactivate()
    for plain, traced in zip(*states, strict=True):
        assert torch.equal(plain, traced)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_run_leaves_other_graphs_of_the_model_as_they_are(
    amp, level: str, is_training: bool
) -> None:
    # they have saved the running statistics
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    model, optimizer = prepared(amp, model.train(is_training), level)
    first, second = model(torch.randn(4, WIDTH)).float().unbind(1)
    with amp.scale_loss(first.mean() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with amp.scale_loss(second.mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert amp.overflow_report().causes


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_in_a_checkpoint_is_named(amp, reentrant: bool) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), RootOfZero()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model, optimizer = prepared(amp, Recomputing(), "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("backward", "inner", "sqrt")


def test_the_call_of_a_shared_module_is_said(amp) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
            nn.init.eye_(self.shared.weight).mul_(100.0)

        def forward(self, x: Tensor) -> Tensor:
            x = x.abs() + 1.0
            for _ in range(4):
                x = self.shared(x)
            return x * 1e-3

    with torch.no_grad():
        model = Growing()
    model, optimizer = prepared(amp, model, "O1")
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.module, cause.call, cause.operator) == ("shared", 3, "linear")
    assert "(call 3)" in str(cause)
    assert cause.weights[0].largest == pytest.approx(100.0)


def test_a_mask_of_infinities_is_no_cause(amp) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scores = nn.Linear(WIDTH, WIDTH), RootOfZero()
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            scores = (x @ x.t() + self.mask).masked_fill(self.mask != 0, -torch.inf)
            return self.scores(torch.softmax(scores, -1) @ x)

    model, optimizer = prepared(amp, Masked(), "O2")
    train(amp, model, optimizer)
    assert the_cause(amp).module == "scores"


def test_a_mask_is_not_taken_for_what_overflows_beside_it(amp) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) + 300.0
            return torch.softmax(x @ x.t() + self.mask, -1) @ x

    model, optimizer = prepared(amp, Masked(), "O1")
    train(amp, model, optimizer)
    assert (the_cause(amp).where, the_cause(amp).operator) == ("forward", "matmul")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(amp, value: float) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    with torch.no_grad():
        model[1][0].weight[0, 0] = value
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("weight", "1.0", "weight")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_an_input_that_is_not_finite_is_named(amp, value: float) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    with amp.scale_loss(square(model(torch.full((4, WIDTH), value))), optimizer) as scaled:
        scaled.backward()
    cause = the_cause(amp)
    assert (cause.where, cause.mended_by) == ("input", None)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_beyond_float16_is_named(amp, level: str) -> None:
    model = around(nn.Tanh())
    with torch.no_grad():
        model[1][0].weight.fill_(1e6)
    model, optimizer = prepared(amp, model, level)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("weight", "1.0", "weight")
    assert ("float_region" in cause.advice()) == (level == "O1")


def test_an_eps_that_is_0_in_float16_is_named(amp) -> None:
    model = around(nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"opt_level": "O3", "trace_overflow": True, "verbosity": 0}
    with pytest.warns(UserWarning, match="eps=1e-08, which is 0"):
        model, optimizer = amp.initialize(model, optimizer, **options)
    for _ in range(2):
        train(amp, model, optimizer, lambda outputs: square(outputs) * 0.0)
    cause = the_cause(amp)
    assert (cause.where, cause.zero_eps) == ("weight", 1e-8)
    assert "eps=1e-08 is 0 in float16" in cause.advice()


def test_an_eps_is_blamed_for_no_weight_that_it_has_not_stepped(amp) -> None:
    model = around(nn.Tanh())
    model[1][0].weight.data[0, 0] = torch.nan  # of a checkpoint, say
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options = {"opt_level": "O3", "trace_overflow": True, "verbosity": 0}
    with pytest.warns(UserWarning, match="eps=1e-08, which is 0"):
        model, optimizer = amp.initialize(model, optimizer, **options)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.zero_eps) == ("weight", None)
    assert "a checkpoint has it" in cause.advice()


def test_an_eps_of_0_is_blamed_in_float32_as_well(amp) -> None:
    model = around(nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    options = {"opt_level": "O1", "trace_overflow": True, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, **options)
    for _ in range(2):
        train(amp, model, optimizer, lambda outputs: square(outputs) * 0.0)
    cause = the_cause(amp)
    assert (cause.where, cause.zero_eps) == ("weight", 0.0)
    assert "the optimizer's eps is 0" in cause.advice()


def test_an_input_beyond_float16_is_told_from_an_operator_that_overflows(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O2")
    with amp.scale_loss(square(model(torch.full((4, WIDTH), 1e6 + 0.5))), optimizer) as scaled:
        scaled.backward()
    cause = the_cause(amp)
    assert (cause.module, cause.operator, cause.operands[0].largest) == ("", "cast", 1e6 + 0.5)
    assert "normalize the input" in cause.advice()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_pass_of_several_that_overflowed_is_found(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    good = torch.randn(4, WIDTH)
    for inputs, delay in ((good, True), (good * 1e30, True), (good, False)):
        with amp.scale_loss(square(model(inputs)), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    assert the_cause(amp).operator == "cast"


def test_steps_in_one_pass_and_late_checks_are_traced(amp) -> None:
    model = around(Scores())
    options = {"fused_step": True, "loss_scale": 8.0, "trace_overflow": True}
    model, optimizer = amp.initialize(
        model, AdamW(model.parameters()), opt_level="O2", verbosity=0, **options
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = square(model(torch.randn(4, WIDTH)))
        with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
            scaled.backward()
        optimizer.step()
    ((cause, count),) = amp.overflow_report().causes
    assert (cause.module, cause.operator, count) == ("1.1", "matmul", 2)


def test_a_model_inside_of_another_is_looked_at_once(amp) -> None:
    inner = around(Scores())
    outer = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
    optimizer = SGD(outer.parameters(), lr=0.1)
    (inner, outer), optimizer = amp.initialize(
        [inner, outer], optimizer, verbosity=0, loss_scale=8.0, trace_overflow=True
    )
    train(amp, outer, optimizer)
    assert (the_cause(amp).model, the_cause(amp).module) == ("Sequential 2", "0.1.1")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_operators_inside_of_an_attention_are_named(amp, level: str) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_bias.fill_(6e4)
        layer.self_attn.in_proj_weight.fill_(6e4)
    layer.norm_first = True
    layer.norm1 = nn.Identity()
    model, optimizer = prepared(amp, nn.Sequential(layer), level)
    with amp.scale_loss(square(model(torch.ones(2, 4, WIDTH))), optimizer) as scaled:
        scaled.backward()
    cause = the_cause(amp)
    assert (cause.where, cause.module, cause.operator) == ("forward", "0.self_attn", "matmul")


def test_inputs_that_a_model_overwrites_are_kept(amp) -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.root = RootOfZero()

        def forward(self, pair: tuple[Tensor, Tensor], *, factor: float) -> dict[str, Tensor]:
            return {"root": self.root(pair[0].mul_(factor) + pair[1])}

    model, optimizer = prepared(amp, Overwriting(), "O1")
    pair = (torch.full((4, WIDTH), 1e-20), torch.zeros(4, WIDTH))
    with amp.scale_loss(square(model(pair, factor=1e20)["root"]), optimizer) as scaled:
        scaled.backward()
    assert the_cause(amp).operator == "sqrt"  # 1e20 would not fit float16


def living_calls() -> list[Call]:
    return [one for one in gc.get_objects() if isinstance(one, Call)]


def test_what_is_recorded_goes_with_its_graph_but_the_last_of_a_model(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O1")
    gc.collect()
    others = len(living_calls())
    outputs = [model(torch.randn(4, WIDTH)) for _ in range(3)]
    assert len(living_calls()) == others + 3
    del outputs
    assert len(living_calls()) == others + 1
    train(amp, model, optimizer, steps=3)
    assert len(living_calls()) == others


def test_a_compiled_model_is_said_not_to_be_seen(amp) -> None:
    model, optimizer = prepared(amp, around(RootOfZero()), "O1")
    compiled = torch.compile(model, backend="eager")
    train(amp, compiled, optimizer)
    cause = the_cause(amp)
    assert cause.where in ("loss", "unknown")
    assert cause.where == "loss" or "torch.compile" in cause.note


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_without_a_loss_scale_a_loss_that_is_not_finite_is_traced(amp, level: str) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level, loss_scale=1.0)
    train(amp, model, optimizer, lambda outputs: square(outputs) * torch.inf)
    assert the_cause(amp).where == "loss"


@pytest.mark.parametrize(
    ("level", "options"),
    [("O0", {}), ("O2", {}), ("O4", {}), ("O5", {}), ("O5", {"fused_step": True})],
)
def test_without_a_loss_scale_a_backward_that_is_not_finite_is_traced(
    amp, level: str, options: dict[str, Any]
) -> None:
    model, optimizer = prepared(amp, around(RootOfZero()), level, loss_scale=1.0, **options)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.module) == ("backward", "sqrt", "1.1")


@pytest.mark.parametrize(
    ("level", "scale"),
    [("O4", 1.0), ("O5", 1.0), ("O1", "dynamic"), ("O1", 8.0), ("O2", "dynamic")],
)
def test_what_the_script_writes_to_gradients_is_not_held_against_the_model(
    amp, level: str, scale: Any
) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level, loss_scale=scale)
    scaled_backward(amp, square(model(torch.randn(4, WIDTH))), optimizer)
    for param in amp.master_params(optimizer):
        param.grad.div_(0.0)
    optimizer.step()
    assert the_cause(amp).where == "written"


@pytest.mark.parametrize(("level", "scale"), [("O1", 8.0), ("O4", 1.0)])
def test_gradients_of_an_optimizer_that_is_not_initialized_are_not_looked_at(
    amp, level: str, scale: float
) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), level, loss_scale=scale)
    other = nn.Parameter(torch.ones(2))
    others = SGD([other], lr=0.1)
    other.grad = torch.full((2,), torch.nan)
    scaled_backward(amp, square(model(torch.randn(4, WIDTH))), optimizer)
    others.step()
    optimizer.step()
    assert not amp.overflow_report().causes


def test_before_a_step_a_model_is_run_again_in_the_precision_that_it_had(amp) -> None:
    model, optimizer = prepared(amp, around(Scores()), "O1", loss_scale=1.0)
    train(amp, model, optimizer)
    cause = the_cause(amp)
    assert (cause.where, cause.operator, cause.dtype) == ("forward", "matmul", "float16")


def test_running_statistics_that_an_overflow_has_spoiled_are_no_cause_of_the_next(amp) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight.data.mul_(1e5)
    model, optimizer = prepared(amp, model, "O2")
    train(amp, model, optimizer, steps=3)
    assert model[1].running_mean.isnan().any()
    cause = the_cause(amp)
    assert (cause.where, cause.module) == ("forward", "0")

    model.eval()
    train(amp, model, optimizer)
    _, read = (cause for cause, _ in amp.overflow_report().causes)
    assert (read.where, read.operator) == ("weight", "running_mean")


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_a_loss_of_nan_whose_gradients_are_finite_is_traced_once(amp, level: str) -> None:
    def nothing_counts(outputs: Tensor) -> Tensor:
        ignored = torch.full((len(outputs),), -100)
        return nn.functional.cross_entropy(outputs.float(), ignored)

    model, optimizer = prepared(amp, around(nn.Tanh()), level)
    train(amp, model, optimizer, nothing_counts)
    assert not amp.step_was_skipped(optimizer)
    assert the_cause(amp).where == "loss"
    assert tracer.overflows == 1


def test_an_overflow_with_a_loss_of_nan_is_told_once(amp) -> None:
    model, optimizer = prepared(amp, around(nn.Tanh()), "O2")
    train(amp, model, optimizer, lambda outputs: square(outputs) * torch.nan)
    assert amp.step_was_skipped(optimizer)
    assert tracer.overflows == 1


class Surveying(StepObserver):
    """Looks at a step's values when it is over."""

    def __init__(self) -> None:
        self.counts: dict[str, Counts] = {}
        self.hidden: list[Cause] = []

    def stepped(self, optimizer: Optimizer, skip: Skip) -> None:
        found = tracer.survey(tracer.last_pass())
        self.counts, self.hidden = found.counts, found.hidden


def test_values_near_the_limits_are_counted_by_module(amp) -> None:
    class Near(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 40000.0) * 1e-5

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Near(), after=0), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert observer.counts["1.1"].large == 4 * WIDTH
    # 1e-5 of a gradient below 1 in the plant, and all of it in the layer before
    assert observer.counts["1.1"].subnormal == 4 * WIDTH
    assert observer.counts["0.0"].subnormal + observer.counts["0.0"].flushed > 0
    assert "1.0" in observer.counts


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_a_loss_scale_has_brought_near_the_limit_are_none(amp, level: str) -> None:
    """A dynamic one doubles until they are, in each training."""
    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(nn.Tanh()), level, loss_scale=40000.0)
    train(amp, model, optimizer, lambda outputs: outputs.float()[0, 0])
    detach()
    assert not amp.step_was_skipped(optimizer)
    assert all(counts.large == 0 for counts in observer.counts.values())


def test_a_report_can_be_written_as_json(amp) -> None:
    model, optimizer = prepared(amp, around(Scores()), "O1")
    train(amp, model, optimizer, steps=2)
    found = json.loads(json.dumps(amp.overflow_report().to_json()))
    assert found["causes"][0]["count"] == 2
    assert found["causes"][0]["module"] == "1.1"
    assert found["causes"][0]["result"]["kinds"] == ["inf"]


def test_nothing_is_traced_unless_it_is_asked_for(amp) -> None:
    model, optimizer = prepared(amp, around(Scores()), "O1", trace_overflow=False)
    hooks = len(model._forward_hooks)
    train(amp, model, optimizer)
    assert amp.overflow_report().causes == []
    amp.deactivate()
    model, optimizer = prepared(amp, model, "O1")
    assert len(model._forward_hooks) == hooks + 1
    amp.deactivate()
    assert len(model._forward_hooks) == 0


def test_trace_overflow_must_be_a_bool(amp) -> None:
    with pytest.raises(TypeError, match="trace_overflow must be a bool; got 'yes'"):
        prepared(amp, around(nn.Tanh()), "O1", trace_overflow="yes")


def test_inf_that_no_gradient_shows_is_counted(amp) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1000.0 + 1000.0
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Norm(), after=0), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert not amp.step_was_skipped(optimizer)
    assert next(iter(observer.counts)) == "1.1"
    assert observer.counts["1.1"].beyond > 0
    assert {name for name, one in observer.counts.items() if one.beyond} == {"1.1"}
    (cause,) = observer.hidden
    assert (cause.module, cause.operator, cause.where) == ("1.1", "mul", "forward")
    assert cause.rule == {"1.1": "float"}


def test_inf_of_a_step_that_overflows_is_told_once(amp) -> None:
    """As its cause, and not as one that no gradient shows, whatever came up before in the same."""

    class Variance(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 200.0 + 500.0
            spread = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
            return (x - x.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt()

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Variance(), after=1), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert amp.step_was_skipped(optimizer)
    assert the_cause(amp).where == "forward"
    assert observer.hidden == []


def test_a_hidden_inf_of_weights_that_have_grown_is_a_matter_of_the_learning_rate(amp) -> None:
    observer = Surveying()
    detach = session.observers.attach(observer)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model, optimizer = prepared(amp, model, "O1")
    train(amp, model, optimizer, lambda outputs: torch.tanh(outputs.float()).mean())
    assert observer.hidden == []
    model[1].weight.data.fill_(6e4)
    model[0].bias.data.fill_(30.0)
    train(amp, model, optimizer, lambda outputs: torch.tanh(outputs.float()).mean())
    detach()
    (cause,) = observer.hidden
    assert cause.rule == {}
    assert "is the learning rate too high?" in cause.advice()


def test_inf_in_an_output_that_the_loss_hides_is_named(amp) -> None:
    observer = Surveying()
    detach = session.observers.attach(observer)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight.data.fill_(6e4)
    model[0].bias.data.fill_(30.0)
    model, optimizer = prepared(amp, model, "O1")
    train(amp, model, optimizer, lambda outputs: torch.tanh(outputs.float()).mean())
    detach()
    assert not amp.step_was_skipped(optimizer)
    (cause,) = observer.hidden
    assert (cause.where, cause.module, cause.operator) == ("forward", "1", "linear")
    assert cause.rule == {"1": "float"}


def test_inf_that_float32_makes_as_well_is_no_hidden_cause(amp) -> None:
    class Divided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.0 / (1.0 / (x.detach() * 0.0))

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Divided(), after=0), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert observer.hidden == []


@pytest.mark.parametrize("mask", ["fill", "add"])
def test_a_mask_of_float16s_lowest_number_is_not_counted(amp, mask: str) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            low = torch.finfo(x.dtype).min
            if mask == "fill":
                return torch.softmax(x.masked_fill(x > 0, low), -1)
            return torch.softmax(x * 0.5 + (x > 0).to(x.dtype) * low, -1)

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Masked(), after=0), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert all(one.large == one.beyond == 0 for one in observer.counts.values())


def test_memory_that_nobody_has_written_to_is_not_looked_at(amp) -> None:
    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(nn.Dropout(), after=0), "O2", loss_scale=2.0)
    torch.use_deterministic_algorithms(True)  # torch.empty is NaN then
    try:
        assert torch.empty(4).isnan().all()
        train(amp, model, optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
        detach()
    assert observer.hidden == []
    assert all(one.large == one.beyond == 0 for one in observer.counts.values())


def test_a_mask_of_minus_inf_is_not_counted(amp) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x.masked_fill(x > 0, -torch.inf), -1).nan_to_num()

    observer = Surveying()
    detach = session.observers.attach(observer)
    model, optimizer = prepared(amp, around(Masked(), after=0), "O2", loss_scale=2.0)
    train(amp, model, optimizer)
    detach()
    assert all(one.beyond == 0 for one in observer.counts.values())
