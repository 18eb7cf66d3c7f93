"""The state of a process: calls of initialize one after the other, errors in the middle, leaks."""

from __future__ import annotations

import functools
import gc
import sys
import time
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
import torch_snapshot
from small_models import normed_pair as make
from support import nightly_but, scaled_backward
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from amp_patch.casting import torch_sites, wrappers
from amp_patch.casting.mode import OFF, process
from amp_patch.casting.patched_functions import PatchedFunctions
from amp_patch.casting.weight_cache import WeightCache
from amp_patch.session import session
from amp_patch.step import (
    optimizer_state,
    optimizer_step,
    prepared_optimizers,
    replaced_methods,
    shared_scalers,
)
from amp_patch.step.observers import StepObserver
from amp_patch.weights import half_model, half_storage

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
CASTING = ("O1", "O4")


def train(amp: ModuleType, model: nn.Module, optimizer: Optimizer, **options: Any) -> float:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    scaled_backward(amp, loss, optimizer, **options)
    optimizer.step()
    return loss.item()


# --- an error in the middle of initialize ---


class Broken(Exception):
    """Raised by what a test breaks."""


def failing_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what ``function`` does, and raise at the end of the given call, counted from 1."""
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            raise Broken
        return result

    return broken


HALF = ("O2", "O3", "O5")
# What raises, at which call, and at which levels it is called at all.
FAILURES: dict[str, tuple[Any, str, int, tuple[str, ...]]] = {
    "hooks": (torch_sites, "install", 1, LEVELS),
    "conversion": (half_storage, "convert", 1, HALF),
    "conversion of the second": (half_storage, "convert", 2, HALF),
    "forward casts": (half_model.ForwardCasts, "attach", 2, LEVELS),
    "cache": (WeightCache, "add_model", 2, CASTING),
    "scalers": (shared_scalers, "LossScaler", 2, LEVELS),
    "masters": (optimizer_step, "MasterWeights", 1, ("O2", "O5")),
    "optimizer": (prepared_optimizers, "OptimizerStep", 2, LEVELS),
    "methods": (replaced_methods.ReplacedMethods, "replace", 2, LEVELS),
    "loads": (optimizer_state, "watch_first_step", 1, ("O3",)),
    "state": (optimizer_state.OptimizerState, "match", 2, HALF),
    "casts": (wrappers.Casts, "wrap", 100, CASTING),
}


def observed(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Everything that initialize may touch: tensors by identity and value, hooks, methods."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks")
    return [
        [(id(tensor), tensor.dtype, tensor.data_ptr(), tensor.tolist()) for tensor in tensors],
        [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        list(map(id, optimizer.state)),
        [list(getattr(m, kind).values()) for m in model.modules() for kind in hooks],
        [len(m._load_state_dict_pre_hooks) for m in model.modules()],
        {name: id(value) for name, value in vars(optimizer).items() if callable(value)},
        {name: list(map(id, one.values())) for name, one in hooks_of(optimizer).items()},
    ]


def hooks_of(optimizer: Optimizer) -> dict[str, Any]:
    return {name: one for name, one in vars(optimizer).items() if isinstance(one, OrderedDict)}


def observed_process() -> list[Any]:
    return [
        process.save(),
        [(id(scaler), scaler.scale) for scaler in session.scalers],
        dict(session.functions._rules),
        session.verbosity,
        session.casts.observer,
        session.initialized,
        len(session.values._values),
        {id(model): level.name for model, level in session.models.levels.items()},
        len(session.optimizers.steps),
    ]


@pytest.mark.parametrize("others", nightly_but(("O1",), (None, "O0", "O1", "O2")))
@pytest.mark.parametrize(
    ("failure", "level"),
    [(failure, level) for failure, (*_, levels) in FAILURES.items() for level in levels],
)
@pytest.mark.filterwarnings("ignore:the optimizers of amp.initialize.. step its models")
def test_an_error_in_the_middle_leaves_everything_as_it_was(
    amp: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: str,
    level: str,
    others: str | None,
) -> None:
    if failure == "hooks":  # installed by the first call only
        others = None
    unpatched = torch_snapshot.take()
    other = make()
    if others is not None:
        amp.initialize(*other, opt_level=others, loss_scale=4.0)
        train(amp, *other)
    model, optimizer = make(Adam, eps=1e-4)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    elsewhere = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    patched = torch_snapshot.take()
    before = observed(model, optimizer), observed(*other), observed_process()
    # A rule of the user's makes the casts be installed anew also beside an O1 model.
    rules = {"softmax": "half"} if level in CASTING else None
    owner, name, call, _ = FAILURES[failure]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_at(call, getattr(owner, name)))
        with pytest.raises(Broken):
            amp.initialize(
                [model, nn.Linear(2, 2)],
                [optimizer, elsewhere],
                opt_level=level,
                num_losses=2,
                verbosity=3,
                rules=rules,
            )
    assert (observed(model, optimizer), observed(*other), observed_process()) == before
    if others != "O1":  # its casts may have been installed anew
        assert torch_snapshot.differences(patched) == []
    assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is (
        torch.float16 if others == "O1" else torch.float32
    )
    assert "Float->Half" not in capsys.readouterr().out  # as verbosity=3 would have it
    if others is not None:
        train(amp, *other)
    # and the same call succeeds once nothing is broken
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, rules=rules)
    train(amp, model, optimizer)
    amp.deactivate()
    assert torch_snapshot.differences(unpatched) == []


@pytest.mark.parametrize("earlier", ["O0", "O1", "O4"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_error_leaves_a_model_of_an_earlier_call_at_its_level(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str, earlier: str
) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=earlier, loss_scale=4.0, verbosity=0)
    expected = train(amp, *amp.initialize(*make(), opt_level=earlier, loss_scale=4.0, verbosity=0))
    # Outside the model's forward, casts are others than its own.
    around = make()
    amp.initialize(*around, opt_level="O1" if earlier == "O4" else "O4", verbosity=0)
    before = observed(model, optimizer)
    with monkeypatch.context() as patch:
        failing = failing_at(1, optimizer_step.OptimizerStep)
        patch.setattr(prepared_optimizers, "OptimizerStep", failing)
        second = SGD(model.parameters(), lr=0.1)
        with pytest.raises(Broken):
            amp.initialize(model, second, opt_level=level, verbosity=0)
    assert observed(model, optimizer)[:3] == before[:3]
    dtypes: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    assert train(amp, model, optimizer) == expected
    assert dtypes == [{"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}[earlier]]


def test_a_function_that_cannot_be_registered_leaves_the_casts_as_they_were(
    amp: ModuleType,
) -> None:
    amp.initialize(*make(), opt_level="O1", verbosity=0)
    with pytest.raises(TypeError, match="immutable type"):
        amp.register_half_function(int, "bit_count")
    ones = torch.ones(2, 2)
    assert torch.mm(ones, ones).dtype is torch.float16
    amp.deactivate()
    amp.initialize(*make(), opt_level="O4", verbosity=0)
    assert torch.mm(ones, ones).dtype is torch.bfloat16


# --- one call after the other ---


def wrapped_depth(function: Any) -> int:
    depth = 0
    while hasattr(function, "__wrapped__"):
        function, depth = function.__wrapped__, depth + 1
    return depth


def test_threads_initialize_one_after_the_other(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one would take the other's half-done patches for torch's own functions."""
    before = torch_snapshot.take()
    inside: list[bool] = []
    original = PatchedFunctions.set_up

    def slow(*args: Any) -> None:
        inside.append(True)
        time.sleep(0.05)
        assert len(inside) == 1
        original(*args)
        inside.pop()

    monkeypatch.setattr(PatchedFunctions, "set_up", slow)
    models = [nn.Linear(2, 2) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(amp.initialize, m, opt_level="O1", verbosity=0) for m in models]:
            done.result()
    assert all(model(torch.ones(1, 2)).dtype is torch.float16 for model in models)
    amp.deactivate()
    assert torch_snapshot.differences(before) == []


def test_patches_do_not_stack(amp: ModuleType) -> None:
    before = torch_snapshot.take()
    depth = wrapped_depth(torch.mm)
    model, optimizer = make()
    runs = [amp.initialize(model, optimizer, opt_level="O1", verbosity=0)]
    sizes = len(session.functions._patches._undo), len(session._torch_patches._undo)
    for number in range(20):
        rules = {"softmax": "half"} if number % 5 == 4 else None
        runs.append(amp.initialize(*make(), opt_level="O1", verbosity=0, rules=rules))
        assert wrapped_depth(torch.mm) == depth + 1
    assert sizes == (len(session.functions._patches._undo), len(session._torch_patches._undo))
    assert len({train(amp, *run) for run in runs}) == 1
    amp.deactivate()
    assert torch_snapshot.differences(before) == []


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_a_hundred_dropped_models_is_kept(amp: ModuleType, level: str) -> None:
    def run_once() -> list[weakref.ref[Any]]:
        model, optimizer = amp.initialize(*make(Adam, eps=1e-4), opt_level=level, verbosity=0)
        train(amp, model, optimizer)
        masters = [p for p in amp.master_params(optimizer) if p not in set(model.parameters())]
        return [weakref.ref(item) for item in (model, optimizer, *model.parameters(), *masters)]

    references = [reference for _ in range(100) for reference in run_once()]
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []
    assert len(session.scalers) == 1
    survivors = {
        "levels": len(session.models.levels),
        "steps": len(session.optimizers.steps),
        "state hooks": len(session.models._state_hooks),
        "values": len(session.values._values),
        "cache": len(session.cache),
        "owners": len(session.cache._owners),
    }
    assert survivors == dict.fromkeys(survivors, 0)
    amp.initialize(*make(), opt_level=level, verbosity=0)
    assert len(session.cache._groups) <= 1


def test_what_is_to_be_undone_of_an_object_goes_with_it(amp: ModuleType) -> None:
    """A search through the drop-in for apex drops one model and optimizer after the other."""
    dropped, kept = nn.Linear(1, 1), nn.Linear(1, 1)
    undone: list[str] = []
    session.call_at_deactivate(functools.partial(undone.append, "dropped"), of=dropped)
    session.call_at_deactivate(functools.partial(undone.append, "kept"), of=kept)
    session.call_at_deactivate(functools.partial(undone.append, "of nobody"))
    del dropped
    session.call_at_deactivate(functools.partial(undone.append, "later"))
    amp.deactivate()
    assert undone == ["later", "of nobody", "kept"]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_memory_of_a_dropped_model_is_free_at_once(amp: ModuleType, level: str) -> None:
    """Python's collector may not come before the next model needs the memory."""

    def run_once() -> list[weakref.ref[Any]]:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        scaled_backward(amp, model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
        masters = amp.master_params(optimizer)
        return [weakref.ref(item) for item in (model, *model.parameters(), *masters)]

    run_once()  # what is done once may make cycles
    gc.disable()
    try:
        assert [item() for item in run_once()] == [None] * 9
    finally:
        gc.enable()


@pytest.mark.parametrize("level", CASTING)
def test_functions_are_unpatched_when_the_last_model_they_were_for_is_gone(
    amp: ModuleType, level: str
) -> None:
    unpatched = torch.mm
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    assert torch.mm is not unpatched
    kept = amp.initialize(*make(), opt_level="O0", verbosity=0)
    assert torch.mm is not unpatched
    del model, optimizer
    amp.initialize(*make(), opt_level="O0", verbosity=0)
    assert torch.mm is unpatched
    assert process.dtype is OFF
    train(amp, *kept)


def test_the_casts_follow_the_models_that_live(amp: ModuleType) -> None:
    ones = torch.ones(2, 2)
    half = make()
    amp.initialize(*half, opt_level="O1", verbosity=0)
    bfloat = make()
    amp.initialize(*bfloat, opt_level="O4", verbosity=0)
    assert torch.mm(ones, ones).dtype is torch.bfloat16
    del bfloat
    amp.initialize(*make(), opt_level="O0", verbosity=0)
    assert torch.mm(ones, ones).dtype is torch.float16


@pytest.mark.parametrize("level", CASTING)
def test_functions_cast_for_tensors_that_no_model_has(amp: ModuleType, level: str) -> None:
    """Weights in a list, or of an ensemble that `torch.func` has stacked."""
    unpatched = torch_snapshot.take()
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 8))
    inputs = torch.randn(16, 8)
    models, optimizer = amp.initialize([], SGD([weight], lr=0.5), opt_level=level, verbosity=0)
    assert models == []
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        outputs = nn.functional.linear(inputs, weight)
        loss = outputs.float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert outputs.dtype is (torch.float16 if level == "O1" else torch.bfloat16)
    assert losses[-1] < 0.5 * losses[0]
    amp.initialize(*make(), opt_level="O0", verbosity=0)  # models that come leave it as it is
    assert nn.functional.linear(inputs, weight).dtype is outputs.dtype
    amp.deactivate()
    assert torch_snapshot.differences(unpatched) == []
    assert process.dtype is OFF


def test_tensors_that_no_model_has_beside_models_cast_as_these(amp: ModuleType) -> None:
    model, optimizer = amp.initialize(*make(), opt_level="O2", verbosity=0)
    other = SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    amp.initialize([], other, opt_level="O1", verbosity=0)
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
    train(amp, model, optimizer)


def test_an_error_without_a_model_leaves_no_casts(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, optimizer = (SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    amp.initialize([], first, opt_level="O0", verbosity=0)
    before = torch_snapshot.take()
    with monkeypatch.context() as patch:
        owner = prepared_optimizers.PreparedOptimizers
        patch.setattr(owner, "set_up", failing_at(1, owner.set_up))
        with pytest.raises(Broken):
            amp.initialize([], optimizer, opt_level="O1", verbosity=0)
    assert torch_snapshot.differences(before) == []
    amp.initialize(*make(), opt_level="O0", verbosity=0)
    assert process.dtype is OFF


def test_rules_last_as_long_as_a_model_at_o1_or_o4(amp: ModuleType) -> None:
    def softmax_dtype() -> torch.dtype:
        return torch.softmax(torch.ones(2, dtype=torch.float16), 0).dtype

    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, rules={"softmax": "half"})
    assert softmax_dtype() is torch.float16
    second = make()
    amp.initialize(*second, opt_level="O1", verbosity=0, rules={"softmin": "off"})
    assert softmax_dtype() is torch.float16
    del model, optimizer, second
    third = make()
    amp.initialize(*third, opt_level="O1", verbosity=0)
    assert softmax_dtype() is torch.float32
    amp.deactivate()
    fourth = make()
    amp.initialize(*fourth, opt_level="O1", verbosity=0, rules={"softmax": "half"})
    amp.deactivate()
    fifth = make()
    amp.initialize(*fifth, opt_level="O1", verbosity=0)
    assert softmax_dtype() is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_listed_twice_is_set_up_once(amp: ModuleType, level: str) -> None:
    model, optimizer = make()
    expected = train(amp, *amp.initialize(*make(), opt_level=level, verbosity=0))
    result = amp.initialize([model, model], optimizer, opt_level=level, verbosity=0)
    assert result == ([model, model], optimizer)
    assert train(amp, model, optimizer) == expected
    amp.deactivate()
    assert observed(model, optimizer)[3:] == observed(*make())[3:]


@pytest.mark.parametrize("level", LEVELS)
def test_set_up_and_ended_in_inference_mode(amp: ModuleType, level: str) -> None:
    expected = train(amp, *amp.initialize(*make(), opt_level=level, verbosity=0))
    model, optimizer = make()
    with torch.inference_mode():
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert train(amp, model, optimizer) == expected
    with torch.inference_mode():
        amp.deactivate()
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))


def test_the_global_step_hook_is_there_once_and_goes_with_deactivate(amp: ModuleType) -> None:
    hooks = torch_optimizer._global_optimizer_post_hooks
    before = len(hooks)
    for _ in range(3):
        amp.initialize(*make(), opt_level="O2", verbosity=0)
    assert len(hooks) == before + 1
    amp.deactivate()
    assert len(hooks) == before


@pytest.mark.parametrize("level", CASTING)
def test_weights_used_between_backward_and_step_are_read_anew_after_it(
    amp: ModuleType, level: str
) -> None:
    """A fused optimizer moves no version counter: only the hook on all steps tells of it."""
    inputs = torch.randn(16, 4)
    model, optimizer = make(AdamW, fused=True)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = model(inputs).detach()
    optimizer.step()
    after = model(inputs).detach()
    fresh, _ = amp.initialize(*make(), opt_level=level, verbosity=0)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, fresh(inputs))
    assert not torch.equal(after, before)


def test_deactivate_leaves_half_state_of_a_users_optimizer_alone(amp: ModuleType) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    optimizer.state[model[0].weight]["average"] = torch.zeros(8, 4, dtype=torch.bfloat16)
    amp.deactivate()
    assert optimizer.state[model[0].weight]["average"].dtype is torch.bfloat16


# --- what a module of the user's has bound ---


@pytest.fixture
def users_module() -> Iterator[types.ModuleType]:
    module = types.ModuleType("users_module")
    module.mm = torch.mm
    sys.modules["users_module"] = module
    yield module
    del sys.modules["users_module"]


def test_bound_names_come_back_after_any_number_of_calls(
    amp: ModuleType, users_module: types.ModuleType
) -> None:
    original = users_module.mm
    for _ in range(3):
        model, optimizer = amp.initialize(*make(), opt_level="O1", verbosity=0)
        amp.initialize(*make(), opt_level="O4", rules={"softmax": "half"}, verbosity=0)
        assert users_module.mm is torch.mm is not original
        amp.deactivate()
        assert users_module.mm is torch.mm is original


def interrupt(at: int, function: Callable[[], Any]) -> int:
    """Press Ctrl-C at one of the calls that a function makes; return how many it made."""
    calls = 0

    def count(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"
        if calls == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        sys.setprofile(count)
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # which torch's no_grad() leaves off, ended in its own code
    return calls


class Failing(StepObserver):
    """An observer that cannot write its file."""

    def leaving(self) -> None:
        raise OSError("the disk is full")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_all_is_restored_though_an_observer_and_an_undo_raise(amp: ModuleType, level: str) -> None:
    model, linear = nn.Linear(2, 2), F.linear
    optimizer, called = SGD(model.parameters(), lr=0.1), []
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def fail() -> None:
        raise ValueError("not undone")

    for undo in (lambda: called.append("first"), fail, lambda: called.append("last")):
        session.call_at_deactivate(undo)
    detach = session.observers.attach(Failing())
    with pytest.raises(ValueError, match="not undone") as caught:
        amp.deactivate()
    detach()
    assert isinstance(caught.value.__context__, OSError)
    assert called == ["last", "first"]
    assert (F.linear is linear, model.weight.dtype) == (True, torch.float32)
    assert not session.initialized
    assert not model._forward_pre_hooks
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.deactivate()


def test_each_observer_is_told_though_one_raises(amp: ModuleType) -> None:
    told = []

    class Told(StepObserver):
        def leaving(self) -> None:
            told.append(self)

    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    detaching = [session.observers.attach(kind()) for kind in (Told, Failing, Told)]
    with pytest.raises(OSError, match="the disk is full"):
        amp.deactivate()
    for detach in detaching:
        detach()
    assert len(told) == 2


def test_casts_are_told_of_by_the_session_that_was_asked_to_alone(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=2)
    told = amp.half_function(torch.neg)
    told(torch.ones(1))
    assert "Float->Half (neg)" in capsys.readouterr().out
    amp.deactivate()
    decorated = amp.half_function(torch.neg)
    amp.initialize(model, opt_level="O1", verbosity=1)
    capsys.readouterr()
    assert decorated(torch.ones(1)).dtype is torch.float16
    assert capsys.readouterr().out == ""


# Where the call is a generator's that ends early, or a weak reference's, Python swallows Ctrl-C.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("level", nightly_but(("O1", "O2"), LEVELS))
def test_a_deactivate_after_one_that_was_interrupted_ends_it(
    amp: ModuleType, users_module: types.ModuleType, level: str
) -> None:
    def seen(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        tensors, *rest = observed(model, optimizer)
        if level == "O3":  # keeps no memory of float32
            tensors = [(dtype, numbers) for _, dtype, _, numbers in tensors]
        return [tensors, *rest]

    users_module.torch, users_module.table = torch, {"mm": torch.mm}
    before, unpatched = dict(users_module.table), torch_snapshot.take()
    amp.initialize(*make(), opt_level=level, verbosity=0)
    calls = interrupt(0, amp.deactivate)
    for at in range(1, calls, calls // 16):
        model, optimizer = make()
        for param in model.parameters():
            param.data.copy_(param.data.half())  # O3 keeps no other numbers
        expected = seen(model, optimizer)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        interrupt(at, amp.deactivate)
        amp.deactivate()
        assert seen(model, optimizer) == expected
        assert users_module.table == before
        assert users_module.mm is before["mm"]
    assert torch_snapshot.differences(unpatched) == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_interrupt_between_two_hooks_leaves_none(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    remove = RemovableHandle.remove
    removals = 0

    def remove_or_stop(handle: RemovableHandle) -> None:
        nonlocal removals
        removals += 1
        if removals == at:
            raise KeyboardInterrupt
        remove(handle)

    monkeypatch.setattr(RemovableHandle, "remove", remove_or_stop)
    for at in range(1, 40):
        removals = 0
        model, optimizer = make()
        expected = observed(model, optimizer)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        try:
            amp.deactivate()
        except KeyboardInterrupt:
            amp.deactivate()
        else:
            assert at > 3  # every hook has had its turn
            break
        assert observed(model, optimizer) == expected


def test_state_is_in_float32_behind_an_interrupted_deactivate(amp: ModuleType) -> None:
    """At O3 an optimizer's state is in half, like the weights that it steps."""
    at = calls = 0
    while at <= calls:
        model = nn.Linear(4, 2)
        optimizer = Adam(model.parameters(), eps=1e-3)
        amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
        train(amp, model, optimizer)
        calls = max(calls, interrupt(at, amp.deactivate))
        at += calls // 32
        amp.deactivate()
        dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
        assert dtypes == {torch.float32}


def test_a_warning_that_is_an_error_leaves_all_as_before(amp: ModuleType) -> None:
    """As by ``python -W error``; this one comes when nearly everything is set up."""
    model, optimizer = make()
    handle = model[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    expected = observed(model, optimizer)
    for _ in range(2):
        with pytest.raises(UserWarning, match="a hook of a tensor"):
            amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        assert observed(model, optimizer) == expected
    handle.remove()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


class Interrupted(nn.Module):
    """A model whose forward ends as Ctrl-C ends one: torch calls no hook then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_the_next_step_ends_an_interrupted_forward(amp: ModuleType) -> None:
    interrupted = amp.initialize(Interrupted(), opt_level="O0", verbosity=0)
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(KeyboardInterrupt):
        interrupted(torch.ones(2, 2))
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32  # of its level
    train(amp, model, optimizer)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize(("level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_casts_are_on_again_after_a_step_that_was_interrupted_anywhere(
    amp: ModuleType, level: str, half: torch.dtype
) -> None:
    model, optimizer = amp.initialize(*make(), opt_level=level, verbosity=0)
    train(amp, model, optimizer)
    calls = interrupt(0, optimizer.step)
    for at in range(1, calls + 1):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        interrupt(at, optimizer.step)
        train(amp, model, optimizer)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is half
        for block in (amp.disable_casts(), torch.autocast("cpu", enabled=False)):
            with block:
                train(amp, model.eval(), optimizer)  # a training call in autocast's warns
                assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        model.train()


class TrainsInItsStep(SGD):
    """Asks for the gradients by itself, and then computes by what functions cast elsewhere."""

    def step(self, closure: Any = None) -> None:
        self.compute_gradients()
        self.dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_stay_off_in_a_step_that_asks_for_its_gradients(amp: ModuleType, level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = TrainsInItsStep(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)

    def compute_gradients() -> None:
        with amp.scale_loss(model(torch.ones(3, 4)).sum(), optimizer) as scaled:
            scaled.backward()

    optimizer.compute_gradients = compute_gradients
    compute_gradients()
    optimizer.step()
    assert optimizer.dtype is torch.float32


class TrainsInForward(nn.Module):
    """Makes the step of a part of its own while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.train_part: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.train_part(self.part(inputs).sum())
        return torch.mm(inputs, inputs)


def test_a_step_inside_of_a_forward_does_not_end_it(amp: ModuleType) -> None:
    model = TrainsInForward()
    optimizer = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    last = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)

    def train_part(loss: torch.Tensor) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    model.train_part = train_part
    assert model(torch.ones(2, 2)).dtype is torch.bfloat16
    del last


@pytest.mark.parametrize("again", ["initialize", "deactivate and initialize"])
def test_an_interrupted_forward_does_not_set_the_casts_of_later_models(
    amp: ModuleType, again: str
) -> None:
    interrupted = amp.initialize(Interrupted(), opt_level="O2", verbosity=0)
    with pytest.raises(KeyboardInterrupt):
        interrupted(torch.ones(2, 2))
    if again == "deactivate and initialize":
        amp.deactivate()
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    assert model(torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize(("level", "is_refused"), [("O1", False), ("O2", True), ("O5", True)])
def test_one_state_of_two_optimizers_is_refused_where_there_are_masters(
    amp: ModuleType, level: str, is_refused: bool
) -> None:
    model = nn.Linear(2, 2)
    optimizers = [SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.2)]
    optimizers[1].state = optimizers[0].state
    with pytest.raises(RuntimeError, match="with one state") if is_refused else nullcontext():
        amp.initialize(model, optimizers, opt_level=level, verbosity=0)
    assert model.weight.dtype is torch.float32
