"""An optimizer's step: skipped as if it had never been called, scheduled, copied, freed."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from linear_training import (
    LEVELS,
    OPTIMIZERS,
    assert_unchanged,
    backward,
    everything,
    linear,
    prepared,
    train_step,
)
from support import allocations, exactly, scaled_backward
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from amp_patch import amp as core
from amp_patch.session import session
from amp_patch.step.given_gradients import NOT_CLEARED

F16, F32 = torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


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


@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_that_overflowed_are_not_stepped_when_they_are_put_back(
    amp: ModuleType, level: str, clear: str
) -> None:
    model, optimizer = prepared(amp, level)
    before = everything(model, optimizer)
    backward(amp, model, optimizer, INF)
    masters = list(amp.master_params(optimizer))
    kept = [master.grad.clone() for master in masters]
    if clear == "by hand":
        for param in (*model.parameters(), *masters):
            param.grad = None
    else:
        (optimizer if clear == "optimizer" else model).zero_grad()
    backward(amp, model, optimizer)
    for master, grad in zip(amp.master_params(optimizer), kept, strict=True):
        master.grad += grad
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert_unchanged(model, optimizer, before)
    train_step(amp, model, optimizer)
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_that_overflowed_skip_steps_until_they_are_cleared(
    amp: ModuleType, level: str
) -> None:
    """Until then each step would be of inf: the next backward adds to it."""

    @given(st.lists(st.sampled_from(["finite", "overflow", "none", "clear"]), max_size=8))
    def run(events: list[str]) -> None:
        # of one element, and stepped itself at O2, too, where half weights start anew at each step
        model = nn.BatchNorm1d(1, affine=True).eval()
        optimizer = SGD(model.parameters(), lr=0.125)
        weight, gradient, are_skipped = 1.0, 0.0, []
        scale = {"loss_scale": 128.0} if level == "O3" else {}  # by its own of 1 nothing is checked
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **scale)
        for event in events:
            if event == "clear":
                optimizer.zero_grad()
                gradient = 0.0
                continue
            if event != "none":
                factor = INF if event == "overflow" else 1.0
                loss = (model.weight * 0.5).float().sum() * factor
                scaled_backward(amp, loss, optimizer)
                gradient += 0.5 * factor
            optimizer.step()
            are_skipped.append(math.isinf(gradient))
            assert amp.step_was_skipped(optimizer) == are_skipped[-1]
            reason = session.optimizers.steps[optimizer].skip.reason
            assert bool(reason) == are_skipped[-1]
            assert (reason == NOT_CLEARED) == (are_skipped[-1] and event != "overflow")
            weight -= 0.0 if are_skipped[-1] else 0.125 * gradient
            assert model.weight.item() == weight
        amp.deactivate()

    run()


def test_a_skipped_step_returns_none_and_runs_no_step_hook(amp: ModuleType) -> None:
    model, optimizer = prepared(amp)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    backward(amp, model, optimizer, INF)
    assert optimizer.step() is None
    assert calls == []


@pytest.mark.filterwarnings("ignore:at a level with fp32 masters")
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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_by_the_class_is_seen_by_the_next_forward(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level, make=lambda params: SGD(params, lr=0.125))
    for _ in range(2):
        before, output = model.weight.clone(), model(torch.ones(2, 4))
        backward(amp, model, optimizer)
        SGD.step(optimizer)
        optimizer.zero_grad()
        assert not torch.equal(model.weight, before)
        assert not torch.equal(model(torch.ones(2, 4)), output)


# --- misuse ---


@pytest.mark.filterwarnings("ignore:a hook of a")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_in_the_backward_of_a_scaled_loss_is_refused(amp: ModuleType, level: str) -> None:
    model, optimizer = prepared(amp, level)
    before = everything(model, optimizer)
    message = (
        r"^optimizer.step\(\) needs unscaled gradients, which there are from the end of a "
        r"scale_loss\(\) block on; got a call inside the block, and not after its backward\(\). "
        r"Move it after the block; at a scale of 1 \(O4, O5\) hooks may step.$"
    )
    loss = model(torch.ones(2, 4)).sum()
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=message):  # noqa: SIM117
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    assert_unchanged(model, optimizer, before)


@pytest.mark.parametrize("call", ["step", "clip"])
def test_scaled_gradients_are_refused(amp: ModuleType, call: str) -> None:
    model, optimizer = prepared(amp)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    caller = {"step": "optimizer.step()", "clip": "amp.clip_grad_norm_()"}[call]
    message = (
        f"{caller} needs unscaled gradients; the last scale_loss(..., delay_unscale=True) or one "
        "under no_sync(), or a GradScaler's scale(), left them scaled. Leave both out in the last "
        "scale_loss() before it, or call scaler.unscale_(optimizer), or clear them with "
        "optimizer.zero_grad()."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        optimizer.step() if call == "step" else amp.clip_grad_norm_(optimizer, 1.0)
    optimizer.zero_grad()
    train_step(amp, model, optimizer)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("micro_batches", [(True,), (True, True), (True, False, True)])
@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O1", {"loss_scale": 1.0}),
        ("O2", {"loss_scale": 1.0}),
        ("O4", {}),
        ("O5", {}),
        ("O5", {"fused_step": True}),
    ],
)
def test_what_a_scale_of_one_has_left_is_stepped(
    amp: ModuleType,
    level: str,
    options: dict[str, Any],
    micro_batches: tuple[bool, ...],
    clips: bool,
) -> None:
    """As at the end of an epoch, whose last micro-batch says that another one follows."""

    def weights_of(level: str, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        for step in range(3):
            for number, delays in enumerate(micro_batches, step):
                loss = model(torch.full((2, 4), 0.5 * number + 1)).float().square().sum()
                with amp.scale_loss(loss, optimizer, delay_unscale=delays) as scaled_loss:
                    scaled_loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        (weight, _) = amp.master_params(optimizer)
        amp.deactivate()
        return weight.detach().clone()

    torch.testing.assert_close(weights_of(level, **options), weights_of("O0"), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_dynamic_scale_that_is_one_now_has_left_is_refused(
    amp: ModuleType, level: str
) -> None:
    """It may hold an overflow, which that scale has to hear of."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    core.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=1.0)
    loss = model(torch.ones(2, 4)).float().sum() * INF
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="needs unscaled gradients"):
        optimizer.step()
    assert_unchanged(model, optimizer, before)


def test_what_one_rank_alone_has_left_is_refused_at_a_scale_of_one(amp: ModuleType) -> None:
    """As a last backward under ``no_sync()``."""
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    core.initialize(model, optimizer, opt_level="O5", verbosity=0)
    loss = model(torch.ones(2, 4)).float().sum()
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    session.optimizers.steps[optimizer].backward.unshared_scale = 1.0
    with pytest.raises(RuntimeError, match=r"or one under no_sync\(\)"):
        optimizer.step()


@pytest.mark.parametrize("micro_batches", [(True,), (False, True), (True, False, True)])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_a_scale_of_one_has_left_is_stepped_by_all_that_hold_it(
    amp: ModuleType, level: str, micro_batches: tuple[bool, ...]
) -> None:
    def weights_of(level: str, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        given = [SGD(model.parameters(), lr=0.1), SGD([model.weight], lr=0.05, momentum=0.5)]
        model, optimizers = amp.initialize(model, given, opt_level=level, verbosity=0, **options)
        for _ in range(2):
            for number, delays in enumerate(micro_batches, 1):
                loss = model(torch.full((2, 4), 0.5 * number)).float().square().sum()
                with amp.scale_loss(loss, optimizers, delay_unscale=delays) as scaled_loss:
                    scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found = [value.clone() for value in model.state_dict().values()]
        core.deactivate()
        return found

    found = weights_of(level, loss_scale=1.0)
    torch.testing.assert_close(found, weights_of("O0"), rtol=0.02, atol=0.01)


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
    model, optimizer = prepared(amp, level, lambda params: AdamW(params, lr=0.125, eps=1e-4))
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


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_no_operator_takes_memory_beyond_gradients_in_float32(
    amp: ModuleType, level: str, fused_step: bool
) -> None:
    """Nor in the first steps, in which writes are looked for; nor inside, where no result tells."""
    model = nn.Linear(1000, 640, bias=False)
    size = model.weight.numel()
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    options = {"opt_level": level, "fused_step": fused_step, "loss_scale": 8.0, "verbosity": 0}
    amp.initialize(model, optimizer, **options)
    for step in range(18):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1000)).float().square().mean()
        if step not in (1, 17):
            scaled_backward(amp, loss, optimizer)
            optimizer.step()
            continue
        taken = allocations(lambda loss=loss: scaled_backward(amp, loss, optimizer))
        assert max(taken) == (2 * size if fused_step else 4 * size)
        assert max(allocations(optimizer.step), default=0) <= 8 << 17  # a strip as integers
