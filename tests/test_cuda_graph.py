"""A whole step in a CUDA graph, on a CPU that records what a GPU would capture."""

import functools
import gc
import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import processes
import pytest
import torch
from cuda_on_cpu.fake_graphs import FakeCuda, Recorded
from hypothesis import given
from hypothesis import strategies as st
from support import exactly, trains
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_patch import cuda_graph
from amp_patch.common.early_looks import WATCHED
from amp_patch.kernels.graph_capture import captures, in_living_graphs
from amp_patch.optimizers import FusedLAMB
from amp_patch.session import session
from amp_patch.weights import unseen_master_writes

CPU = torch.device("cpu")
WARM_UP = 2


# level, optimizer, and whether it steps in one pass
KINDS: dict[str, tuple[str, Callable[..., Optimizer], bool]] = {
    "O1 adamw": ("O1", functools.partial(AdamW, lr=0.125, fused=True), False),
    "O1 momentum": ("O1", functools.partial(SGD, lr=0.125, momentum=0.5, fused=True), False),
    "O2 adam": ("O2", functools.partial(Adam, lr=0.125, fused=True), False),
    "O2 adamw, one pass": ("O2", functools.partial(AdamW, lr=0.125), True),
    "O2 lamb, one pass": ("O2", functools.partial(FusedLAMB, lr=0.125), True),
    "O2 momentum, one pass": (
        "O2", functools.partial(SGD, lr=0.125, momentum=0.5, dampening=0.25), True,
    ),
    "O4 sgd": ("O4", functools.partial(SGD, lr=0.125), False),
    "O5 adamw, one pass": ("O5", functools.partial(AdamW, lr=0.125), True),
}  # fmt: skip


class Training:
    """A small training whose batch, and whether its gradients overflow, lie in tensors."""

    def __init__(self, amp: ModuleType, kind: str, **options: Any) -> None:
        level, make, one_pass = KINDS[kind]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
        options = {"max_loss_scale": 1024.0, "growth_interval": 2, **options}
        self.amp = amp
        self.model, self.optimizer = amp.initialize(
            model, make(model.parameters()), opt_level=level, verbosity=0, fused_step=one_pass,
            **options,
        )  # fmt: skip
        self.inputs, self.factor = torch.zeros(5, 4), torch.ones(())
        self.calls = 0

    def load(self, number: int, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(number)
        self.inputs.copy_(torch.randn(5, 4, generator=generator))
        self.factor.fill_(factor)

    def step(self, keeps_graph: bool = False) -> Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).float().square().mean() * self.factor
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.amp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        return loss if keeps_graph else loss.detach()

    def state(self) -> list[Any]:
        stepped = [one for group in self.optimizer.param_groups for one in group["params"]]
        tensors = [*self.model.parameters(), *self.model.buffers(), *stepped]
        entries = [list(entry.values()) for entry in self.optimizer.state.values()]
        outcome = self.amp.step_was_skipped(self.optimizer), self.amp.loss_scale()
        copies = [tensor.detach().clone() for tensor in tensors]
        counts = session.scalers[0].numbers()
        flat = [one.detach().clone() for entry in entries for one in entry if one is not None]
        return [copies, flat, outcome, counts]


def assert_same(ones: Any, others: Any) -> None:
    torch.testing.assert_close(ones, others, rtol=0, atol=0, equal_nan=True)


def captured(training: Training, warm_up: int = WARM_UP) -> cuda_graph.CapturedStep:
    training.load(0)
    return cuda_graph.capture(training.step, warm_up=warm_up)


EVENTS = st.lists(st.sampled_from(["step", "step", "overflow", "outside"]), max_size=3)


Step = Callable[[Training], Any]


def warmed_up(
    amp: ModuleType, kind: str, is_captured: bool, step: Step = Training.step
) -> tuple[Training, Callable[[], Any]]:
    """Return a training after its first steps, and what makes one more: a graph, or ``step``."""
    training = Training(amp, kind)
    training.load(0)
    make = functools.partial(step, training)
    if is_captured:
        return training, cuda_graph.capture(make, warm_up=WARM_UP).replay
    for _ in range(WARM_UP):
        make()
    return training, make


def test_replays_are_the_steps_themselves(amp: ModuleType, cuda: FakeCuda) -> None:
    @trains()
    @given(st.sampled_from(list(KINDS)), EVENTS)
    def run(kind: str, events: list[str]) -> None:
        histories = []
        for is_captured in (False, True):
            training, make_step = warmed_up(amp, kind, is_captured)
            history = [training.state()]
            for number, event in enumerate(events):
                overflows = event == "overflow" and not kind.startswith(("O4", "O5"))
                training.load(number, torch.inf if overflows else 1.0)
                loss = (training.step if event == "outside" else make_step)()
                history.append([loss.clone(), training.state()])
            histories.append(history)
            amp.deactivate()
        assert_same(histories[1], histories[0])

    run()


def trained_with_gradients_in_place(
    amp: ModuleType, level: str, by: str, is_captured: bool
) -> list[Tensor]:
    """Return the weights after seven steps that clear gradients by zeros, where they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    inputs, cleared = torch.randn(5, 4), {"model": model, "optimizer": optimizer}[by]

    def step() -> None:
        cleared.zero_grad(set_to_none=False)
        with amp.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    again: Callable[[], object] = step
    if is_captured:
        again = cuda_graph.capture(step, warm_up=3).replay
    for _ in range(4 if is_captured else 7):
        again()
    weights = [one.detach().clone() for one in amp.master_params(optimizer)]
    amp.deactivate()
    return weights


@pytest.mark.parametrize("by", ["model", "optimizer"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_gradients_that_stay_in_place_are_captured(
    amp: ModuleType, cuda: FakeCuda, level: str, by: str
) -> None:
    eager, replayed = (
        trained_with_gradients_in_place(amp, level, by, one) for one in (False, True)
    )
    assert_same(replayed, eager)


@pytest.mark.parametrize("kind", ["O1 adamw", "O4 sgd"])
def test_a_capture_that_fails_leaves_no_cast_that_nothing_computed(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind)

    def step() -> Tensor:
        if cuda.is_capturing:
            return training.model(training.inputs).sum().item()  # what no capture allows
        return training.step()

    training.load(0)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        cuda_graph.capture(step, warm_up=WARM_UP)
    assert session.cache.casts() == []


@pytest.mark.parametrize("kind", KINDS)
def test_python_runs_for_the_capture_and_not_for_replays(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind)
    step = captured(training, warm_up=3)
    before = training.calls
    assert before == 3 + 1
    results = [step.replay() for _ in range(3)]
    assert training.calls == before
    assert all(one is step.result for one in results)
    assert isinstance(step.graph, Recorded)


@pytest.mark.parametrize("kind", ["O1 momentum", "O2 momentum, one pass", "O2 adam"])
def test_steps_are_made_until_one_is_not_skipped(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind)
    training.load(0)
    make = training.step

    def step() -> Tensor:
        training.factor.fill_(torch.inf if training.calls < 5 else 1.0)
        return make()

    cuda_graph.capture(step, warm_up=2)
    assert training.calls == 6 + 1
    assert not amp.step_was_skipped(training.optimizer)
    assert amp.loss_scale() == 1024.0 / 2**5


@pytest.mark.parametrize("kind", ["O1 adamw", "O2 adamw, one pass"])
def test_a_static_scale_does_not_fall_until_a_step_is_made(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind, loss_scale=2.0**60, growth_interval=None)
    message = "two in a row that were skipped, .* at the static loss scale 1.15.*e.18"
    with pytest.raises(FloatingPointError, match=f"{message}. Call amp.initialize"):
        captured(training, warm_up=2)
    assert training.calls == 3


def test_a_capture_is_no_step(amp: ModuleType, cuda: FakeCuda) -> None:
    for kind in KINDS:
        training = Training(amp, kind)
        training.load(0)
        for _ in range(WARM_UP):
            training.step()
        expected = training.state()
        amp.deactivate()
        training = Training(amp, kind)
        captured(training)
        assert_same(training.state(), expected)
        amp.deactivate()


@pytest.mark.parametrize("kind", ["O1 adamw", "O2 adamw, one pass"])
def test_what_was_loaded_between_replays_counts(amp: ModuleType, cuda: FakeCuda, kind: str) -> None:
    training = Training(amp, kind, max_loss_scale=2.0**24)
    step = captured(training)
    step.replay()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 0}})
    training.load(0, torch.inf)
    step.replay()
    assert amp.loss_scale() == 128.0
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 0}


def test_what_was_written_to_masters_and_weights_counts(amp: ModuleType, cuda: FakeCuda) -> None:
    histories = []
    for is_captured in (False, True):
        training, step = warmed_up(amp, "O2 adamw, one pass", is_captured)
        step()
        masters = list(amp.master_params(training.optimizer))
        with torch.no_grad():
            for master, param in zip(masters, training.model.parameters(), strict=True):
                master.mul_(0.5)
                if not is_captured and param is not master:
                    param.copy_(master)  # a replay's forward reads what was written
        step()
        with torch.no_grad():
            training.model[0].weight.clamp_(-0.1, 0.1)
        step()
        histories.append(training.state())
        amp.deactivate()
    assert_same(histories[1], histories[0])


def write_half(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.1, 0.1)


def write_half_by_data(training: Training) -> None:
    training.model[0].weight.data.clamp_(-0.1, 0.1)


def write_stepped(training: Training) -> None:
    with torch.no_grad():
        training.optimizer.param_groups[0]["params"][0].mul_(0.5)


def write_stepped_by_data(training: Training) -> None:
    training.optimizer.param_groups[0]["params"][0].data.mul_(0.5)


def write_master(training: Training) -> None:
    with torch.no_grad():
        next(iter(training.amp.master_params(training.optimizer))).mul_(0.5)


def write_master_by_data(training: Training) -> None:
    next(iter(training.amp.master_params(training.optimizer))).data.mul_(0.5)


def read_masters(training: Training) -> None:
    _ = [one.clone() for one in training.amp.master_params(training.optimizer)]


def read_data(training: Training) -> None:
    _ = [one.data.clone() for one in training.optimizer.param_groups[0]["params"]]


def evaluate(training: Training) -> None:
    training.model(training.inputs)


def save(training: Training) -> None:
    training.model.state_dict()


def load(training: Training) -> None:
    generator = torch.Generator().manual_seed(5)
    state = training.model.state_dict()
    drawn = {
        name: torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in state.items()
        if "weight" in name
    }
    training.model.load_state_dict({**state, **drawn})


Event = Callable[[Training], object]
WRITES: list[Event] = [
    write_half, write_half_by_data, write_stepped, write_stepped_by_data, write_master,
    write_master_by_data, read_masters, read_data, evaluate, save, load,
]  # fmt: skip
#: A step that a graph makes, and one that it does not.
REPLAY, STEP = "replay", "step"


def after_events(
    amp: ModuleType, kind: str, events: list[Any], is_captured: bool, step: Step = Training.step
) -> list[Any]:
    """Return the state after these events, of which replays are steps without a graph."""
    training, replay = warmed_up(amp, kind, is_captured, step)
    for number, event in enumerate(events):
        training.load(number)
        if event in (REPLAY, STEP):
            (replay if event == REPLAY else training.step)()
        else:
            event(training)
    state = training.state()
    amp.deactivate()
    return state


MASTERS = [kind for kind in KINDS if kind.startswith(("O2 adam", "O2 mom", "O5"))]


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (MASTERS[0], [evaluate, REPLAY, write_half, STEP]),
        (MASTERS[1], [REPLAY, write_half, evaluate, REPLAY]),
        (MASTERS[2], [REPLAY, write_half, read_masters, REPLAY]),
        (MASTERS[3], [save, REPLAY, write_half_by_data, STEP]),
        (MASTERS[1], [REPLAY, REPLAY, load, STEP, REPLAY]),
        (MASTERS[0], [REPLAY, read_data, REPLAY, write_half, REPLAY]),
        (MASTERS[3], [*[REPLAY] * 17, write_half, STEP]),
        (MASTERS[1], [REPLAY, write_stepped, REPLAY]),
        (MASTERS[0], [REPLAY, write_stepped_by_data, REPLAY, write_stepped_by_data, REPLAY]),
        (MASTERS[2], [*[REPLAY] * 17, write_stepped_by_data, STEP, write_half, REPLAY]),
        (MASTERS[3], [REPLAY, write_master_by_data, evaluate, REPLAY]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_written_between_replays_counts(
    amp: ModuleType, cuda: FakeCuda, kind: str, events: list[Any]
) -> None:
    eager, replayed = (after_events(amp, kind, events, one) for one in (False, True))
    assert_same(replayed, eager)


@pytest.mark.filterwarnings("ignore:between two forward passes:UserWarning")  # both are written to
def test_what_is_written_in_any_order_between_replays_counts(
    amp: ModuleType, cuda: FakeCuda
) -> None:
    @trains()
    @given(
        st.sampled_from(MASTERS),
        st.lists(st.sampled_from([REPLAY, STEP, *WRITES]), min_size=3, max_size=7),
    )
    def run(kind: str, events: list[Any]) -> None:
        eager, replayed = (after_events(amp, kind, [*events, REPLAY], one) for one in (False, True))
        assert_same(replayed, eager)

    run()


@pytest.mark.parametrize("kind", [MASTERS[1], MASTERS[2]])
def test_what_a_captured_step_writes_to_masters_counts(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    """As the bounds of a WGAN's weights, in each step."""

    def step(training: Training) -> None:
        training.step()
        with torch.no_grad():
            for master in amp.master_params(training.optimizer):
                master.clamp_(-0.1, 0.1)

    events = [*[REPLAY] * 3, evaluate]
    eager, replayed = (after_events(amp, kind, events, one, step) for one in (False, True))
    assert_same(replayed, eager)


def clip_by_largest(training: Training) -> None:
    training.amp.clip_grad_norm_(training.optimizer, 0.25, norm_type=torch.inf)


def halve_gradients(training: Training) -> None:
    for master in training.amp.master_params(training.optimizer):
        master.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("kind", "blocks", "act"),
    [
        (MASTERS[0], 6, read_masters),
        (MASTERS[1], 1, clip_by_largest),
        (MASTERS[1], 2, read_masters),
        (MASTERS[2], 1, halve_gradients),
        (MASTERS[2], 7, clip_by_largest),
    ],
)
def test_a_step_of_many_blocks_that_looks_at_gradients_is_captured(
    amp: ModuleType, cuda: FakeCuda, kind: str, blocks: int, act: Event
) -> None:
    def step(training: Training) -> None:
        training.optimizer.zero_grad()
        for number in range(blocks):
            loss = training.model(training.inputs * (number + 1)).float().square().mean()
            with amp.scale_loss(loss * training.factor, training.optimizer) as scaled_loss:
                scaled_loss.backward()
        act(training)
        training.optimizer.step()

    eager, replayed = (after_events(amp, kind, [REPLAY] * 3, one, step) for one in (False, True))
    assert_same(replayed, eager)


@pytest.mark.parametrize("kind", [MASTERS[0], MASTERS[1]])
def test_replays_read_no_masters_and_end_the_looks_for_unseen_writes(
    amp: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    training = Training(amp, kind)
    step = captured(training)
    step.replay()
    looks: list[Tensor] = []
    look = unseen_master_writes.sum_of_bits

    def noting(master: Tensor) -> Tensor:
        looks.append(master)
        return look(master)

    monkeypatch.setattr(unseen_master_writes, "sum_of_bits", noting)
    for _ in range(WATCHED):
        step.replay()
    evaluate(training)
    training.step()
    evaluate(training)
    assert looks == []


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_forward_that_follows_a_replay_reads_the_new_weights(
    amp: ModuleType, cuda: FakeCuda, is_captured: bool
) -> None:
    training = Training(amp, "O1 adamw")
    step = captured(training).replay
    for _ in range(3):
        if is_captured:
            step()
        training.load(0)
        weight, bias = (one.half() for one in training.model[0].parameters())
        expected = nn.functional.linear(training.inputs.half(), weight, bias)
        assert torch.equal(training.model[0](training.inputs), expected)


def test_a_step_that_ends_in_a_forward_casts_its_weights_in_each_replay(
    amp: ModuleType, cuda: FakeCuda
) -> None:
    def step(training: Training) -> Tensor:
        training.step()
        return training.model[0](training.inputs).detach()

    histories = []
    for is_captured in (False, True):
        training, make_step = warmed_up(amp, "O1 adamw", is_captured, step)
        results = []
        for number in range(3):
            with torch.no_grad():
                training.model[0].weight.mul_(0.5)
            training.load(number)
            results.append(make_step().clone())
        histories.append([results, training.state()])
        amp.deactivate()
    assert_same(histories[1], histories[0])


def test_other_threads_may_allocate_during_a_capture(amp: ModuleType, cuda: FakeCuda) -> None:
    """As that of a DataLoader which pins memory."""
    captured(Training(amp, "O1 adamw"))
    assert cuda.error_mode == "thread_local"


def test_a_graph_is_captured_on_the_device_of_the_parameters(
    amp: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, used = Training(amp, "O1 adamw"), set()
    make, device = training.step, torch.device("cuda", 1)
    monkeypatch.setattr(cuda_graph, "_device_of", lambda params: device)

    def step() -> Tensor:
        used.add(cuda.device)
        return make()

    released = cuda_graph.capture(step)._host_side
    assert (used, cuda.device, released.device) == ({1}, 0, device)


class On:
    """Stands in for a parameter that is on a device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_parameters_on_several_devices_are_refused() -> None:
    assert cuda_graph._device_of([On("cpu"), On("meta")]) is None
    assert cuda_graph._device_of([On("cpu"), On("cuda:1"), On("cuda:1")]) == torch.device("cuda:1")
    message = (
        "a CUDA graph captures what one device does; got models with parameters on cuda:0, cuda:1. "
        "Call the step function itself in each iteration."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        cuda_graph._device_of([On("cuda:1"), On("cuda:0")])


def test_messages_of_replays_are_printed(
    amp: ModuleType, cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(amp, "O2 adamw, one pass")
    step = captured(training)
    session.verbosity = 1
    for factor in (torch.inf, 1.0, torch.inf):
        training.load(0, factor)
        step.replay()
    amp.loss_scale()
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step, loss scaler 0") == 2


def test_two_passes_in_one_step_are_both_told_of(
    amp: ModuleType, cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(amp, "O2 adamw, one pass")

    def twice() -> None:
        training.step()
        training.step()

    step = cuda_graph.capture(twice, warm_up=2)
    session.verbosity = 1
    training.load(0, torch.inf)
    step.replay()
    assert amp.loss_scale() == 256.0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["512.0", "256.0"]


def test_a_scale_that_stays_at_its_floor_ends_the_replays(amp: ModuleType, cuda: FakeCuda) -> None:
    training = Training(amp, "O1 adamw", min_loss_scale=512.0)
    step = captured(training)
    training.load(0, torch.inf)
    for _ in range(3):
        step.replay()
    message = (
        "gradients must become finite at some loss scale; got two replays in a row whose are not, "
        "with loss scaler 0 at its floor 512.0. Call the step function itself: the error that it "
        "raises names the parameters."
    )
    with pytest.raises(FloatingPointError, match=re.escape(message)):
        step.replay()
    with pytest.raises(FloatingPointError, match=r"0.weight \(NaN\)"):
        training.step()


def test_the_graph_keeps_what_the_session_lets_go(amp: ModuleType, cuda: FakeCuda) -> None:
    training = Training(amp, "O1 adamw")
    casts: list[StorageWeakRef] = []
    make = training.step

    def step() -> Tensor:
        loss = make()
        casts[:] = [StorageWeakRef(cast.untyped_storage()) for cast in session.cache.casts()]
        return loss

    training.load(0)
    kept = cuda_graph.capture(step, warm_up=2)
    kept.graph.operations.clear()  # a graph knows addresses, and holds no tensor
    assert len(session.cache) == 0
    assert len(casts) == 4
    assert not any(cast.expired() for cast in casts)
    del kept
    assert all(cast.expired() for cast in casts)


@pytest.mark.parametrize("kind", KINDS)
def test_no_autograd_graph_of_the_capture_lives_on(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind)
    make = training.step
    losses: list[Tensor] = []

    def step() -> dict[str, Any]:
        losses[:] = [make(keeps_graph=True)]
        return {"loss": losses[0], "all": (losses[0] * 2, "text"), "inputs": training.inputs}

    training.load(0)
    kept = cuda_graph.capture(step, warm_up=WARM_UP)
    assert losses.pop().grad_fn is not None
    kept.replay()
    kept.graph.operations.clear()  # a graph knows addresses, and holds no tensor
    assert in_living_graphs(training.model.parameters()) == []
    assert kept.result["inputs"] is training.inputs
    assert kept.result["loss"].item() * 2 == kept.result["all"][0].item()
    assert kept.result["all"][1] == "text"


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_still_held_is_refused_before_anything_is_done(
    amp: ModuleType, cuda: FakeCuda, kind: str
) -> None:
    training = Training(amp, kind)
    training.load(0)
    loss = training.step(keeps_graph=True)
    calls = training.calls
    message = (
        "a step is captured on a stream of its own, so that no autograd graph of an earlier step "
        "may be alive; got a loss or an output that is still held, whose graph leads to 6 "
        "parameters, '0.weight' among them. Call loss = loss.detach(), or del loss, before "
        "amp_patch.cuda_graph.capture()."
    )
    with pytest.raises(RuntimeError, match=exactly(message)):
        cuda_graph.capture(training.step)
    assert training.calls == calls
    loss = loss.detach()
    training.model[0].weight.requires_grad_(False)  # as where a part is frozen
    cuda_graph.capture(training.step)


def test_a_graph_that_others_hold_is_theirs_in_distributed_training(
    amp: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistributedDataParallel holds the nodes that add to gradients."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    training = Training(amp, "O1 adamw")
    training.load(0)
    loss = training.step(keeps_graph=True)
    cuda_graph.capture(training.step)
    assert loss.grad_fn is not None


@pytest.mark.slow(instead="its calls beside a GPU that is made up")
def test_the_example_runs_as_it_stands_without_a_gpu() -> None:
    script = Path(__file__).parents[1] / "examples" / "cuda_graph.py"
    # torch 2.6 leaves a temporary folder to its finalizer
    warnings = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")
    command = [sys.executable, *warnings, str(script), "--epochs", "2", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = processes.run(command, env=environment)
    assert done.stderr == ""
    assert re.fullmatch(r"O2: loss 2\.3\d+ -> 0\.\d+, \d+\.\d\d ms per step\n", done.stdout)


def test_what_a_graph_copies_from_goes_with_it(
    amp: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(amp, "O1 adamw")
    make, memory = training.step, [torch.zeros(3)]
    reference = weakref.ref(memory[0])

    def step() -> Tensor:
        if cuda.is_capturing:
            captures.keep(memory[0])
        return make()

    training.load(0)
    kept = cuda_graph.capture(step, warm_up=WARM_UP)
    memory.clear()
    gc.collect()
    assert reference() is not None
    del kept
    gc.collect()
    assert reference() is None


# --- what is refused ---


def test_a_replay_after_deactivate_is_refused(amp: ModuleType, cuda: FakeCuda) -> None:
    step = captured(Training(amp, "O1 adamw"))
    amp.deactivate()
    message = (
        "a captured step needs the models and optimizers as amp.initialize() left them; got a "
        "replay after amp.deactivate(). Call amp.initialize() and amp_patch.cuda_graph.capture() "
        "again."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        step.replay()


WAITS = (
    "a step in a CUDA graph must be one that its device can skip: the optimizer is stepped by "
    "kernels (fused_step=True) or is one of torch's with fused=True, its momentum is there, its "
    "gradients are dense; got one for which the host has to wait. Step it outside of the graph, or "
    "call amp.initialize(..., fused_step=True)."
)


def test_an_optimizer_that_must_be_told_is_refused(
    amp: ModuleType, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "plain", ("O1", functools.partial(SGD, lr=0.125), False))
    with pytest.raises(RuntimeError, match=re.escape(WAITS)):
        captured(Training(amp, "plain"))


@pytest.mark.parametrize("kind", ["O1 momentum", "O2 momentum, one pass", "O2 adamw, one pass"])
def test_a_step_that_needs_the_host_is_refused(amp: ModuleType, cuda: FakeCuda, kind: str) -> None:
    training = Training(amp, kind)

    def step() -> None:
        training.optimizer.zero_grad()
        with amp.scale_loss(training.model(training.inputs).sum(), training.optimizer) as loss:
            loss.backward()
        for master in amp.master_params(training.optimizer):
            if "one pass" in kind:  # also before, when the tables for it are uploaded
                master.grad = master.grad.t().contiguous().t()
            elif cuda.is_capturing:
                training.optimizer.state[master].clear()
        training.optimizer.step()

    with pytest.raises(RuntimeError, match=re.escape(WAITS)):
        cuda_graph.capture(step)


def test_a_capture_of_somebody_else_is_refused(amp: ModuleType, cuda: FakeCuda) -> None:
    training = Training(amp, "O1 adamw")
    training.step()
    session.settle()
    assert not amp.step_was_skipped(training.optimizer)
    message = (
        "a step whose device skips it is captured by amp_patch.cuda_graph.capture(), which tells "
        "the host of each replay; got a capture without it, by torch.cuda.graph() or the like; "
        "call amp_patch.cuda_graph.capture(step_function)."
    )
    with (
        pytest.raises(RuntimeError, match=re.escape(message)),
        cuda.graph(Recorded(), None, None),
    ):
        training.step()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"step": 3},
            TypeError,
            "capture() needs a function that makes one training step, without arguments; got int",
        ),
        ({"warm_up": 2.0}, TypeError, "warm_up must be an int; got 2.0"),
        ({"warm_up": True}, TypeError, "warm_up must be an int; got True"),
        (
            {"warm_up": 1},
            ValueError,
            "warm_up must be at least 2, for the first step makes what later ones use; got 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    step = arguments.pop("step", lambda: None)
    mend = "; call amp_patch.cuda_graph.capture(step_function, warm_up=3)."
    with pytest.raises(error, match=exactly(message + mend)):
        cuda_graph.capture(step, **arguments)


def test_without_a_gpu_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = (
        f"a CUDA graph needs a CUDA device; got torch {torch.__version__} with "
        "torch.cuda.is_available() False. Call the step function itself in each iteration."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        cuda_graph.capture(lambda: None)


def test_amp_must_be_initialized(cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match=r"Invoked 'amp_patch.cuda_graph.capture\(\)', but"):
        cuda_graph.capture(lambda: None)
