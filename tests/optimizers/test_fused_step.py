"""fused_step=True does what fused_step=False does, to the bit, whatever is done in between."""

import copy
import functools
import gc
import pickle
import re
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from drawn_trainings import ACTIONS, EPS, INF, Make, Run, assert_same, gradients_of
from hypothesis import given
from hypothesis import strategies as st
from support import drawn_for, exactly, profiled, trains
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from amp_patch.kernels import small_tensors
from amp_patch.optimizers import FusedLAMB, step_parts
from amp_patch.optimizers.direct_step import DirectStep
from amp_patch.weights.parameter_lists import stored_grad

# The trainings here clear no gradients between steps, which is told of.
pytestmark = pytest.mark.filterwarnings(
    "ignore:at a level with fp32 masters the gradients of a step"
)

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: AdamW(p, lr=0.05, eps=EPS),
    "adamw fused": lambda p: AdamW(p, lr=0.05, eps=EPS, fused=True),
    "adam amsgrad": lambda p: Adam(p, lr=0.05, eps=EPS, amsgrad=True, weight_decay=0.1),
    "adam maximize": lambda p: Adam(p, lr=0.05, eps=EPS, maximize=True, foreach=True),
    "sgd": lambda p: SGD(p, lr=0.05),
    "sgd momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    # torch refuses to begin with the momentum of some parameters and of others later
    "sgd fused": lambda p: SGD(p, lr=0.05, fused=True),
    "lamb": lambda p: FusedLAMB(p, lr=0.05),
}


@pytest.fixture(autouse=True)
def torch_steps_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own steps be what fused_step=False does, also for fused optimizers."""
    monkeypatch.setattr(DirectStep, "suits", staticmethod(lambda optimizer: False))


def assert_fused_is_the_same(amp: ModuleType, name: str, level: str, drawn: Any) -> None:
    """Train by what is drawn, fused and not.

    Args:
        drawn: a strategy of actions, each a method of `Run` with its arguments.
    """
    kept = Run(amp, True, level, OPTIMIZERS[name])  # torch stays patched while it lives

    @trains()
    @drawn_for(name, level)
    @given(st.lists(drawn, max_size=8), st.booleans())
    def run(actions: list[tuple[str, dict[str, Any]]], reads: bool) -> None:
        fused, plain = (Run(amp, fused, level, OPTIMIZERS[name]) for fused in (True, False))
        for action, options in actions:
            results = [getattr(one, action)(**options) for one in (fused, plain)]
            assert_same(*results)
            assert_same(fused.everything(), plain.everything())
            if reads:
                assert_same(gradients_of(fused), gradients_of(plain))
        for one in (fused, plain):
            one.clear("plain")
            one.train()
        assert_same(fused.everything(), plain.everything())

    run()
    del kept


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the mistakes that are drawn, too
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_training_is_the_same(amp: ModuleType, name: str, level: str) -> None:
    assert_fused_is_the_same(amp, name, level, ACTIONS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the mistakes that are drawn, too
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_training_is_the_same_with_large_gradients_in_half(
    amp: ModuleType, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_tensors, "_SMALL", 5)  # weights are large, biases are small
    monkeypatch.setattr(step_parts, "_MOST", 20)
    # to write to gradients that wait in half is refused
    actions = ACTIONS.filter(lambda action: action[0] != "write_half_gradients")
    assert_fused_is_the_same(amp, name, level, actions)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_used_gradients_that_a_backward_passes_over_stay_used(
    amp: ModuleType, level: str, fused: bool
) -> None:
    run = Run(amp, fused, level, OPTIMIZERS["sgd"])
    run.train()
    run.train(leave_out="first")
    first = list(run.amp.master_params(run.optimizer))[:2]
    before = copy.deepcopy(first)
    assert [one.grad for one in first] == [None, None]
    run.step()
    assert_same(first, before)
    assert run.model.first.weight.grad is not None


# --- what is done once, and what is not done ---


def run_of(amp: ModuleType, name: str = "adamw", **options: Any) -> Run:
    return Run(amp, True, options.pop("level", "O2"), OPTIMIZERS[name], **options)


@pytest.fixture
def plain_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of calls of torch's own steps."""
    calls: list[str] = []
    for name in ("adam", "adamw", "sgd"):
        module = sys.modules[f"torch.optim.{name}"]
        original = getattr(module, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> None:
            calls.append(name)
            original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "lamb"])
def test_torchs_own_step_is_not_called(amp: ModuleType, plain_steps: list[str], name: str) -> None:
    run = run_of(amp, name)
    run.train()
    run.train(leave_out="second")
    run.add_group()
    run.train()
    assert plain_steps == []
    plain = Run(amp, False, "O2", OPTIMIZERS[name])
    plain.train()
    assert plain_steps != []


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("adamw", "lr", torch.tensor(0.05)),
        ("sgd", "lr", torch.tensor(0.05)),
        ("adamw", "betas", (torch.tensor(0.9), torch.tensor(0.999))),
        ("sgd", "differentiable", True),
    ],
)
def test_torchs_own_step_does_what_the_fused_one_does_not(
    amp: ModuleType, plain_steps: list[str], name: str, option: str, value: Any
) -> None:
    fused, plain = (Run(amp, which, "O2", OPTIMIZERS[name]) for which in (True, False))
    for run in (fused, plain):
        for group in run.optimizer.param_groups:
            group[option] = value
        run.train()
    assert len(plain_steps) == 4
    assert_same(fused.everything(), plain.everything())


def test_the_masters_gradients_are_not_stored_until_they_are_read(amp: ModuleType) -> None:
    run = run_of(amp)
    masters = [
        param
        for group in run.optimizer.param_groups
        for param in group["params"]
        if all(param is not own for own in run.model.parameters())
    ]
    assert len(masters) == 4
    run.backward()
    assert [stored_grad(master) for master in masters] == [None] * 4
    assert masters[2].grad is not None
    assert None not in [stored_grad(master) for master in masters]
    run.step()
    assert [master.grad for master in masters] == [None] * 4


@pytest.mark.parametrize("reader", ["param_groups", "master_params"])
def test_the_step_uses_what_was_written_to_a_gradient(amp: ModuleType, reader: str) -> None:
    run = run_of(amp, "sgd")
    before = [p.detach().clone() for p in amp.master_params(run.optimizer)]
    run.backward()
    if reader == "master_params":
        masters = list(amp.master_params(run.optimizer))
    else:
        masters = [p for group in run.optimizer.param_groups for p in group["params"]]
    for master in masters:
        master.grad.fill_(2.0)
    run.step()
    lrs = [0.05] * 4 + [0.02] * 2
    for master, old, lr in zip(masters, before, lrs, strict=True):
        torch.testing.assert_close(master.detach(), old - 2 * lr)


@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_goes_from_one_to_the_other(
    amp: ModuleType, name: str, fused_first: bool
) -> None:
    first, second = (
        Run(amp, which, "O2", OPTIMIZERS[name]) for which in (fused_first, not fused_first)
    )
    straight = Run(amp, False, "O2", OPTIMIZERS[name])
    for seed in range(3):
        first.train(seed=seed)
        straight.train(seed=seed)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for run in (second, straight):
        run.model.zero_grad()
        run.train(seed=5)
    assert_same(second.everything(), straight.everything())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_deactivate_the_optimizer_goes_on_by_itself(amp: ModuleType, name: str) -> None:
    results = []
    for fused in (True, False):
        run = Run(amp, fused, "O2", OPTIMIZERS[name])
        run.train()
        run.backward(seed=1)
        amp.deactivate()
        run.optimizer.step()
        run.loss(seed=2).backward()
        run.optimizer.step()
        assert type(run.model.first.weight) is nn.Parameter
        results.append([list(run.model.parameters()), [p.grad for p in run.model.parameters()]])
    assert_same(*results)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_an_optimizer_is_copied_while_gradients_wait(amp: ModuleType, copied: Any) -> None:
    run = run_of(amp)
    run.train()
    run.backward()
    twin = copied(run.optimizer)
    assert_same(
        [p for group in twin.param_groups for p in group["params"]],
        [p for group in run.optimizer.param_groups for p in group["params"]],
    )
    run.step()
    assert not amp.step_was_skipped(run.optimizer)


def test_a_sparse_gradient_is_stepped_as_ever(amp: ModuleType, plain_steps: list[str]) -> None:
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        optimizer = SGD(model.parameters(), lr=0.5)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", verbosity=0, fused_step=fused, loss_scale=8.0
        )
        for _ in range(2):
            with amp.scale_loss(model(torch.tensor([1, 2, 1])).sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in amp.master_params(optimizer)])
    assert_same(*weights)
    assert len(plain_steps) == 4


def test_two_optimizers_share_a_backward(amp: ModuleType) -> None:
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizers = [AdamW(model[0].parameters(), eps=EPS), SGD(model[1].parameters(), lr=0.1)]
        model, optimizers = amp.initialize(
            model, optimizers, opt_level="O2", verbosity=0, fused_step=fused, loss_scale=8.0
        )
        for factor in (1.0, INF, 1.0):
            loss = model(torch.ones(2, 4)).float().sum() * factor
            with amp.scale_loss(loss, optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                assert amp.step_was_skipped(optimizer) == (factor == INF)
                optimizer.zero_grad()
        weights.append([p.detach().clone() for o in optimizers for p in amp.master_params(o)])
    assert_same(*weights)


# --- what torch runs around a step ---


def test_hooks_see_gradients_before_and_weights_after(amp: ModuleType) -> None:
    run = run_of(amp, "sgd")
    weight, calls = run.model.second.weight, []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert args == (optimizer,)
        calls.append([m.grad.clone() for m in amp.master_params(optimizer)])

    handles = [
        run.optimizer.register_step_pre_hook(before),
        run.optimizer.register_step_post_hook(lambda *_: calls.append(weight.clone())),
    ]
    run.backward()
    old = weight.clone()
    run.step()
    for handle in handles:
        handle.remove()
    gradients, published = calls
    assert gradients[4].any()
    assert torch.equal(published, weight)
    assert not torch.equal(published, old)


@pytest.mark.parametrize("built", ["before", "after"])
def test_a_scheduler_counts_the_steps(amp: ModuleType, built: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5) if built == "before" else None
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", verbosity=0, fused_step=True, loss_scale=8.0
    )
    scheduler = scheduler or ExponentialLR(optimizer, 0.5)
    for expected in (0.05, 0.025):
        with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()  # warns where it has not seen a step
        assert optimizer.param_groups[0]["lr"] == expected


def test_the_profiler_sees_the_step(amp: ModuleType) -> None:
    run = run_of(amp)
    run.backward()
    with profiled() as profile:
        run.step()
    assert "Optimizer.step#AdamW.step" in [event.name for event in profile.events()]


def test_what_belongs_to_an_optimizer_goes_with_it(amp: ModuleType) -> None:
    run = run_of(amp)
    run.train()
    run.backward()
    masters = list(run.optimizer.param_groups[0]["params"])
    reference = weakref.ref(run.optimizer)
    gc.collect()
    gc.disable()
    try:
        del run.optimizer
        assert reference() is None
    finally:
        gc.enable()
    assert [master.grad for master in masters[:2]] == [None, None]


# --- misuse ---

NEITHER = "call amp.initialize(..., fused_step=False)."


def initialize(amp: ModuleType, optimizer: Optimizer, level: str = "O2", fused: Any = True) -> None:
    model = nn.Linear(2, 2)
    optimizer.param_groups[0]["params"][:] = model.parameters()
    before = [param.clone() for param in model.parameters()]
    try:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, fused_step=fused)
    finally:
        assert_same(list(model.parameters()), before)
        assert "step" not in vars(optimizer) or callable(vars(optimizer)["step"])


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1))]


class Derived(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "name"),
    [(NAdam, "torch.optim.nadam.NAdam"), (Derived, "test_fused_step.Derived")],
)
def test_other_optimizers_are_refused(amp: ModuleType, make: Make, name: str) -> None:
    known = (
        "fused_step=True steps torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, "
        "torch.optim.RMSprop, torch.optim.Adagrad, amp_patch.optimizers.FusedLAMB"
    )
    # an apex that was imported before has entered its own
    entered = r"(, apex\.[A-Za-z_.]+)*"
    got = f", these very types; got {name}; {NEITHER}"
    with pytest.raises(TypeError, match=f"^{re.escape(known)}{entered}{re.escape(got)}$"):
        initialize(amp, make(some()))


@pytest.mark.parametrize("owner", ["the optimizer", "its type"])
def test_a_replaced_step_is_refused(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    optimizer = AdamW(some())

    @functools.wraps(AdamW.step)
    def step(self: AdamW) -> None:
        pass

    monkeypatch.setattr(optimizer if owner == "the optimizer" else AdamW, "step", step)
    message = (
        "fused_step=True takes the place of the optimizer's own step(); got one that was replaced "
        f"on this AdamW, and would not be called; {NEITHER}"
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        initialize(amp, optimizer)


LACKING = "fused_step=True knows no differentiable=True and no tensors as options but for lr; got "


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("differentiable", True),
        ("betas", (torch.tensor(0.5), 0.9)),
        ("weight_decay", torch.tensor(0.5)),
    ],
)
def test_options_that_are_lacking_are_refused(amp: ModuleType, option: str, value: Any) -> None:
    optimizer = AdamW(some())
    optimizer.param_groups[0][option] = value
    message = f"{LACKING}{option}={value!r}; leave that out, or {NEITHER}"
    with pytest.raises(RuntimeError, match=exactly(message)):
        initialize(amp, optimizer)


def test_a_group_with_options_that_are_lacking_is_refused_later_too(amp: ModuleType) -> None:
    run = run_of(amp)
    message = f"{LACKING}differentiable=True; leave that out, or {NEITHER}"
    with pytest.raises(RuntimeError, match=exactly(message)):
        run.optimizer.add_param_group({"params": [run.spare], "differentiable": True})
    assert len(run.optimizer.param_groups) == 2
    with pytest.raises(TypeError, match="param_group must be a dict"):
        run.optimizer.add_param_group([run.spare])
    run.train()


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_levels_without_masters_are_refused(amp: ModuleType, level: str) -> None:
    message = (
        "fused_step=True steps master weights, in one pass with the rest; got opt_level "
        f"'{level}', which has none; call amp.initialize(..., opt_level='O2', fused_step=True) or "
        "'O5'."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        initialize(amp, AdamW(some()), level)


def test_fused_step_is_a_bool(amp: ModuleType) -> None:
    message = "fused_step must be a bool; got 1; call amp.initialize(..., fused_step=True)."
    with pytest.raises(TypeError, match=exactly(message)):
        initialize(amp, AdamW(some()), fused=1)
