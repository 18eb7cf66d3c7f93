"""torch's steps without torch's Python do what torch's own do, to the bit, or give way."""

import contextlib
import copy
import functools
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_trainings import ACTIONS, EPS, Run, assert_same, gradients_of
from hypothesis import given
from hypothesis import strategies as st
from stepping import ADAGRAD_MAKES_STATES
from support import drawn_for, profiled, scaled_backward, trains
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import distribute_tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.kernels.graph_capture import captures
from amp_patch.optimizers import step_parts
from amp_patch.optimizers.direct_step import DirectStep
from amp_patch.tools.sweep.memory import LivingTensors

LEVELS = ["O0", "O1", "O2", "O4", "O5"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.05, eps=EPS, fused=True),
    "adam": lambda p: Adam(
        p, lr=0.05, eps=EPS, fused=True, amsgrad=True, weight_decay=0.1, maximize=True
    ),
    "sgd": lambda p: SGD(p, lr=0.05, fused=True, weight_decay=0.1),
    "adamw, one by one": lambda p: AdamW(p, lr=0.05, eps=EPS, weight_decay=0.1),
    "adam, foreach": lambda p: Adam(p, lr=0.05, eps=EPS, foreach=True, amsgrad=True, maximize=True),
    "sgd, one by one": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, foreach": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.1, foreach=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.05, eps=EPS, momentum=0.9, weight_decay=0.1),
    "rmsprop, foreach": lambda p: RMSprop(
        p, lr=0.05, eps=0.1, centered=True, maximize=True, foreach=True
    ),
    "adagrad": lambda p: Adagrad(p, lr=0.05, eps=EPS, lr_decay=0.1, weight_decay=0.1),
    "adagrad, foreach": lambda p: Adagrad(p, lr=0.05, eps=EPS, maximize=True, foreach=True),
}


@pytest.fixture
def own_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of calls of torch's own steps."""
    calls: list[str] = []
    for name in ("adamw", "adam", "sgd", "rmsprop", "adagrad"):
        module = sys.modules[f"torch.optim.{name}"]
        # AdamW steps by the functions of Adam, but in torch 2.6, where it has its own
        noted = "adam" if name == "adamw" else name
        # what the function calls that the step calls: were that replaced, no step would be direct
        for kind in ("_single_tensor", "_multi_tensor", "_fused"):
            original = getattr(module, f"{kind}_{name}", None)
            if original is None:
                continue

            def counted(*args: Any, original: Any = original, name: str = noted, **kw: Any) -> None:
                calls.append(name)
                original(*args, **kw)

            monkeypatch.setattr(module, f"{kind}_{name}", counted)
    return calls


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the mistakes that are drawn, too
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_training_is_the_same(
    amp: ModuleType, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(is_direct: bool) -> Run:
        with monkeypatch.context() as patch:
            if not is_direct:
                patch.setattr(DirectStep, "suits", staticmethod(lambda optimizer: False))
            return Run(amp, False, level, OPTIMIZERS[name])

    kept = started(True)  # torch stays patched while it lives

    @trains()
    @drawn_for(name, level)
    @given(st.lists(ACTIONS, max_size=8))
    def run(actions: list[tuple[str, dict[str, Any]]]) -> None:
        direct, own = started(True), started(False)
        for action, options in actions:
            results = [getattr(one, action)(**options) for one in (direct, own)]
            assert_same(*results)
            assert_same(direct.everything(), own.everything())
            assert_same(gradients_of(direct), gradients_of(own))
        for one in (direct, own):
            one.clear("plain")
            one.train()
        assert_same(direct.everything(), own.everything())

    run()
    del kept


class Training:
    """A layer at a level, stepped by one of the optimizers."""

    def __init__(self, amp: ModuleType, optimizer_type: Any = AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.amp = amp
        model = nn.Linear(3, 2)
        optimizer = optimizer_type(model.parameters(), **{"lr": 0.1, "fused": True, **options})
        self.prepare(optimizer)
        self.model, self.optimizer = amp.initialize(
            model, optimizer, opt_level="O1", verbosity=0, loss_scale=8.0
        )

    def prepare(self, optimizer: Optimizer) -> None:
        pass

    def train(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 3)).float().square().mean()
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("optimizer_type", [AdamW, Adam, SGD])
def test_torchs_python_is_not_called(
    amp: ModuleType, own_steps: list[str], optimizer_type: Any
) -> None:
    training = Training(amp, optimizer_type)
    for _ in range(3):
        training.train()
    assert own_steps == []
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    training.train()
    assert len(own_steps) == 1


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"fused": None}, {"foreach": True, "fused": None}]
)
@pytest.mark.parametrize("optimizer_type", [AdamW, Adam, SGD])
def test_nor_for_steps_that_are_not_fused(
    amp: ModuleType, own_steps: list[str], optimizer_type: Any, options: dict[str, Any]
) -> None:
    training = Training(amp, optimizer_type, **options)
    for _ in range(3):
        training.train()
    assert own_steps == []


@pytest.mark.parametrize(
    ("optimizer_type", "options"),
    [
        (AdamW, {"betas": (torch.tensor(0.9), torch.tensor(0.999))}),
        (SGD, {"fused": False, "lr": torch.tensor(0.1)}),
        # which writes to the gradients, too
        (SGD, {"fused": False, "foreach": True, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_other_steps_of_torch_are_called(
    amp: ModuleType, own_steps: list[str], optimizer_type: Any, options: dict[str, Any]
) -> None:
    Training(amp, optimizer_type, **options).train()
    assert len(own_steps) == 1


def test_options_in_a_list_are_looked_at_in_each_step(
    amp: ModuleType, own_steps: list[str]
) -> None:
    class Numbers(list[Any]):
        """As a reader of YAML returns them."""

    training = Training(amp, AdamW)
    training.optimizer.param_groups[0]["betas"] = betas = Numbers([0.9, 0.999])
    training.train()
    assert own_steps == []
    betas[:] = [torch.tensor(0.9), torch.tensor(0.999)]
    training.train()
    assert own_steps == ["adam"]


def test_a_group_that_becomes_such_a_one_is_stepped_by_torch(
    amp: ModuleType, own_steps: list[str]
) -> None:
    training = Training(amp, SGD, momentum=0.9, nesterov=True)
    training.train()
    assert own_steps == []
    training.optimizer.param_groups[0].update(fused=False, foreach=True)
    training.train()
    assert own_steps == ["sgd"]


@pytest.mark.parametrize(
    ("options", "is_direct"),
    [
        ({}, True),
        ({"foreach": True}, True),
        ({"fused": True}, True),
        ({"foreach": False}, False),
        ({"fused": False}, False),
        ({"momentum": 0.9, "nesterov": True}, False),
    ],
)
def test_on_cuda_only_steps_that_torch_makes_by_functions_for_many_are_made_so(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_direct: bool
) -> None:
    def set_up(param: nn.Parameter) -> tuple[DirectStep, Optimizer]:
        optimizer = SGD([param], lr=0.1, **options)
        return DirectStep(optimizer), optimizer

    class Own(nn.Parameter):
        """Of which torch does not know whether it has such functions."""

    plain, own = (set_up(kind(torch.ones(2))) for kind in (nn.Parameter, Own))
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    assert plain[0].is_right(plain[1]) is is_direct
    assert own[0].is_right(own[1]) is (is_direct and bool(options))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: False))
    assert plain[0].is_right(plain[1]) is (options == {"fused": True})


def test_a_step_that_is_not_fused_takes_little_more_memory(amp: ModuleType) -> None:
    def peak(is_direct: bool) -> int:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])
        optimizer = AdamW(model.parameters())
        direct = DirectStep(optimizer)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        for _ in range(2):
            with LivingTensors() as living:
                direct.run(optimizer) if is_direct else optimizer.step()
        return living.peak

    of_two_layers = 2 * 256 * 256 * 4
    assert peak(True) <= peak(False) + of_two_layers


def test_on_a_gpu_a_share_is_stepped_at_once(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AdamW makes on the way, a denominator for each number, takes a fourth of torch's."""

    def stepped(is_direct: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
        optimizer = AdamW(model.parameters(), foreach=True)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        direct = DirectStep(optimizer)
        step = functools.partial(direct.run, optimizer) if is_direct else optimizer.step
        step()  # makes the state
        with LivingTensors() as living:
            before = living.peak
            step()
        return list(model.parameters()), living.peak - before

    theirs, of_theirs = stepped(is_direct=False)
    monkeypatch.setattr(step_parts, "_LEAST_OF_GPU", 1)
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    ours, of_ours = stepped(is_direct=True)
    assert of_theirs >= sum(param.nbytes for param in theirs)
    assert of_ours <= 0.27 * of_theirs
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("optimizer_type", [AdamW, SGD])
def test_on_a_gpu_a_small_model_is_stepped_by_one_call_of_each_function(
    monkeypatch: pytest.MonkeyPatch, optimizer_type: type[Optimizer]
) -> None:
    """Where the host takes the time, two calls for biases and weights would take twice of it."""
    calls = []
    name = "_foreach_sqrt" if optimizer_type is AdamW else "_foreach_add_"
    original = getattr(torch, name)
    monkeypatch.setattr(
        torch, name, lambda *args, **kw: (calls.append(1), original(*args, **kw))[1]
    )
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
    optimizer = optimizer_type(model.parameters(), lr=0.1, foreach=True)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    DirectStep(optimizer).run(optimizer)
    assert calls == [1]


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
@pytest.mark.parametrize("kind", [Adam, RMSprop])
def test_tensors_without_numbers_are_stepped_by_torch(
    amp: ModuleType, kind: type[Any], level: str
) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.1, eps=1e-4)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(3, 4)).float().sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    amp.deactivate()  # outside of the mode
    assert model.weight.dtype is torch.float32


def test_a_subclass_steps_itself(amp: ModuleType) -> None:
    class Counting(AdamW):
        looked_up = 0

        def _init_group(self, *args: Any) -> Any:
            self.looked_up += 1
            return super()._init_group(*args)

    training = Training(amp, Counting)
    training.train()
    assert training.optimizer.looked_up == 1


def test_a_step_with_a_closure_evaluates_it(amp: ModuleType) -> None:
    training = Training(amp)
    losses = []

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.model(torch.ones(4, 3)).float().square().mean()
        with amp.scale_loss(loss, training.optimizer) as scaled_loss:
            scaled_loss.backward()
        losses.append(loss.detach())
        return losses[-1]

    results = [training.optimizer.step(closure) for _ in range(2)]
    assert_same(results, losses)
    assert losses[1] != losses[0]


def test_no_kernel_of_ours_steps(amp: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("amp_patch.optimizers.fused_step.CudaStep", refuse)
    Training(amp).train()


def counting(calls: list[Any], original: Any, copies_marks: bool = False) -> Any:
    """Return a step that somebody writes around another."""

    def step(*args: Any, **kwargs: Any) -> Any:
        calls.append("own")
        return original(*args, **kwargs)

    return functools.wraps(original)(step) if copies_marks else step


@pytest.mark.parametrize("copies_marks", [True, False])
def test_a_step_that_was_replaced_on_the_optimizer_is_called(
    amp: ModuleType, copies_marks: bool
) -> None:
    calls: list[Any] = []

    class Replaced(Training):
        def prepare(self, optimizer: Optimizer) -> None:
            step = counting(calls, AdamW.step, copies_marks)
            optimizer.step = types.MethodType(step, optimizer)

    Replaced(amp).train()
    assert calls == ["own"]


@pytest.mark.parametrize("copies_marks", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_step_that_was_replaced_on_the_class_is_called(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, is_before: bool, copies_marks: bool
) -> None:
    calls: list[Any] = []
    replaced = counting(calls, AdamW.step, copies_marks)
    if is_before:
        monkeypatch.setattr(AdamW, "step", replaced)
    training = Training(amp)
    if not is_before:
        monkeypatch.setattr(AdamW, "step", replaced)
    training.train()
    assert calls == ["own"]


@pytest.mark.parametrize("is_before", [True, False])
def test_schedulers_see_the_step(
    amp: ModuleType, own_steps: list[str], recwarn: pytest.WarningsRecorder, is_before: bool
) -> None:
    class Scheduled(Training):
        def prepare(self, optimizer: Optimizer) -> None:
            self.scheduler = ExponentialLR(optimizer, 0.5) if is_before else None

    training = Scheduled(amp)
    scheduler = training.scheduler or ExponentialLR(training.optimizer, 0.5)
    for lr in (0.05, 0.025):
        training.train()
        scheduler.step()
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]
    assert own_steps == []


def test_a_step_that_was_replaced_and_then_wrapped_by_a_scheduler_is_called(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Scheduled(Training):
        def prepare(self, optimizer: Optimizer) -> None:
            optimizer.step = types.MethodType(counting(calls, AdamW.step), optimizer)
            ExponentialLR(optimizer, 0.5)

    Scheduled(amp).train()
    assert calls == ["own"]


# torch 2.6's own
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_parameters_on_several_ranks_are_stepped_by_torch(own_steps: list[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
        optimizer = AdamW([param], fused=True)
        param.grad = distribute_tensor(torch.ones(4), mesh)
        DirectStep(optimizer).run(optimizer)
    finally:
        dist.destroy_process_group()
    assert own_steps == ["adam"]


def test_hooks_run_in_torchs_order(amp: ModuleType) -> None:
    training = Training(amp)
    seen: list[Any] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("before", training.model.weight.detach().clone()))
        training.model.weight.grad.zero_()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("after", training.model.weight.detach().clone()))

    training.optimizer.register_step_pre_hook(before)
    training.optimizer.register_step_post_hook(after)
    training.train()
    (first, old), (second, new) = seen
    assert (first, second) == ("before", "after")
    # the gradient that the hook wrote moves nothing; AdamW's decay does: 1 - 0.1 * 0.01
    torch.testing.assert_close(new, old * 0.999)


@pytest.mark.parametrize("is_profiled", [False, True])
def test_hooks_behind_the_step_get_what_torchs_get(
    amp: ModuleType, own_steps: list[str], is_profiled: bool
) -> None:
    seen: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, args == (optimizer,), kwargs))

    def register(optimizer: Optimizer) -> None:
        optimizer.register_step_post_hook(note("own"))
        optimizer.register_step_post_hook(note("second"))

    training, plain = Training(amp), AdamW([torch.ones(2, requires_grad=True)], fused=True)
    with contextlib.ExitStack() as ends:
        ends.callback(register_optimizer_step_post_hook(note("global")).remove)
        for optimizer in (training.optimizer, plain):
            register(optimizer)
        if is_profiled:
            profile = ends.enter_context(profiled())
        training.train()
        ours, seen[:] = list(seen), []
        assert own_steps == []
        plain.step()
    assert ours == seen == [(name, True, {}) for name in ("own", "second", "global")]
    if is_profiled:
        marks = [event.name for event in profile.events()]
        assert marks.count("Optimizer.step#AdamW.step") == 2


def test_a_hook_behind_the_step_that_raises_ends_it(amp: ModuleType) -> None:
    training = Training(amp)
    before = training.model.weight.detach().clone()

    def fail(*_: Any) -> None:
        raise KeyError("of the user's")

    handle = training.optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyError, match="of the user's"):
        training.train()
    assert not torch.equal(training.model.weight, before)
    assert torch.is_grad_enabled()
    handle.remove()
    training.train()


def test_a_scaler_of_others_that_skips_the_step_is_obeyed(amp: ModuleType) -> None:
    training = Training(amp)
    training.train()
    before = copy.deepcopy(training.model.state_dict())
    training.optimizer.found_inf = torch.tensor(1.0)
    training.optimizer.grad_scale = None
    training.train()
    assert_same(dict(training.model.state_dict()), dict(before))


def test_in_a_capture_torch_looks_whether_it_may_step(
    amp: ModuleType, own_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(amp)
    training.train()
    monkeypatch.setattr(type(captures), "are_made", lambda self, device: True)
    direct = DirectStep(AdamW([torch.ones(2, requires_grad=True)], fused=True))
    assert direct.is_right(training.optimizer)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    assert not direct.is_right(training.optimizer)


def test_a_group_without_parameters_is_no_hindrance(amp: ModuleType) -> None:
    training = Training(amp)
    training.optimizer.param_groups.insert(0, {**training.optimizer.param_groups[0], "params": []})
    before = training.model.weight.detach().clone()
    training.train()
    assert not torch.equal(training.model.weight, before)


def test_state_is_saved_and_loaded_as_torchs(amp: ModuleType, tmp_path: Any) -> None:
    training = Training(amp)
    training.train()
    path = tmp_path / "state.pt"
    torch.save(training.optimizer.state_dict(), path)
    saved = torch.load(path)
    alone = nn.Linear(3, 2)
    alone.load_state_dict(training.model.state_dict())
    optimizer = AdamW(alone.parameters(), lr=0.1, fused=True)
    optimizer.load_state_dict(saved)
    inputs = torch.ones(4, 3)
    amp.deactivate()
    for model, stepped in ((alone, optimizer), (training.model, training.optimizer)):
        stepped.zero_grad()
        model(inputs).square().mean().backward()
        stepped.step()
    assert_same(dict(training.model.state_dict()), dict(alone.state_dict()))
    assert all(isinstance(state["step"], Tensor) for state in optimizer.state.values())


class Wrapper:
    """A wrapper of ``step`` that is no function; counts its calls."""

    def __init__(self, function: Any, shows: bool) -> None:
        functools.update_wrapper(self, function)
        self.function, self.shows, self.calls = function, shows, 0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        if name == "function" or not self.shows:
            raise AttributeError(name)
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def _take_away(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state.pop(param, None)


RESETS: dict[str, Callable[[Any], Any]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "pop": _take_away,
    "another": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "setstate": lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)}),
}


@pytest.mark.parametrize("steps", [(1,), (3,), (2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_taken_away_begins_anew(
    amp: ModuleType, name: str, reset: str, steps: tuple[int, ...]
) -> None:
    if "adagrad" in name and not ADAGRAD_MAKES_STATES:
        pytest.skip("torch 2.6 makes no state later")

    def train(level: str | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS[name](model.parameters())
        if level is not None:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for number in range(6):
            if number in steps:
                RESETS[reset](optimizer)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean()
            if level is None:
                loss.backward()
            else:
                scaled_backward(amp, loss, optimizer)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], len(optimizer.state)

    (expected, count), (found, found_count) = train(None), train("O0")
    assert all(map(torch.equal, found, expected))
    assert found_count == count


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_class_step_that_is_no_function_is_called(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, fused: bool, shows: bool
) -> None:
    wrapper = Wrapper(AdamW.step, shows)
    monkeypatch.setattr(AdamW, "step", wrapper)
    training = Training(amp, fused=fused)
    training.train()
    assert wrapper.calls == 1


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_groups_steps_nothing(amp: ModuleType, fused: bool) -> None:
    training = Training(amp, fused=fused)
    training.optimizer.param_groups.clear()
    training.optimizer.step()


def test_steps_in_inference_mode_leave_counters_that_others_can_advance(amp: ModuleType) -> None:
    training = Training(amp)
    training.train()
    for is_inference in (True, False):
        training.model.weight.grad = torch.ones(2, 3)
        training.model.bias.grad = None
        with torch.inference_mode(is_inference):
            training.optimizer.step()
    counts = [state["step"].item() for state in training.optimizer.state.values()]
    assert counts == [3.0, 1.0]


def test_a_profile_of_all_threads_sees_the_step(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(amp)
    marks: list[str] = []
    original = torch.autograd.profiler.record_function

    def marked(name: str) -> Any:
        marks.append(name)
        return original(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", marked)
    with profiled():
        thread = threading.Thread(target=training.train)
        thread.start()
        thread.join()
    assert "Optimizer.step#AdamW.step" in marks


@pytest.mark.parametrize(("opt_level", "fused_step"), [("O1", False), ("O2", False), ("O2", True)])
def test_state_that_was_replaced_goes_at_once(
    amp: ModuleType, opt_level: str, fused_step: bool
) -> None:
    """Else it would lie beside the loaded one through a forward and a backward."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    options = {"loss_scale": 8.0, "fused_step": fused_step, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, **options)

    def step() -> None:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(4, 3)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    step()
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    old = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    optimizer.load_state_dict(saved)
    assert [reference() for reference in old] == [None, None]
    step()
    assert all(state["step"] == 3 for state in optimizer.state.values())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_that_a_script_replaced_is_called(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    calls: list[int] = []
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    if when == "before":
        monkeypatch.setattr(sys.modules[SGD.__module__], "sgd", lambda *_, **__: calls.append(1))
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    if when == "after":
        monkeypatch.setattr(sys.modules[SGD.__module__], "sgd", lambda *_, **__: calls.append(1))
    scaled_backward(amp, model(torch.ones(1, 2)).sum(), optimizer)
    optimizer.step()
    assert calls == [1]
