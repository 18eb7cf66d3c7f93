"""Steps that the device skips, tried on the CPU: as if the host had looked at every check."""

import functools
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import processes
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import CountItems, scaled_backward, trains
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from amp_patch.kernels import HostCopy
from amp_patch.optimizers import FusedLAMB
from amp_patch.scaling import device_scaler
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.session import session
from amp_patch.step import loss_scaling
from amp_patch.step.skip import Outcome, Skip

MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.125, fused=True),
    "adam": lambda params: Adam(params, lr=0.125, fused=True),
    "momentum": lambda params: SGD(params, lr=0.125, momentum=0.5, dampening=0.25, fused=True),
    "sgd": lambda params: SGD(params, lr=0.125, fused=True),
    "adagrad": lambda params: Adagrad(params, lr=0.125, fused=True),
    "foreach": lambda params: SGD(params, lr=0.125, momentum=0.5, foreach=True),
}
FUSED = [name for name in MAKERS if name != "foreach"]
# for fused_step=True
ONE_PASS: dict[str, Callable[..., Optimizer]] = {
    "one pass, adamw": lambda params: AdamW(params, lr=0.125, fused=True),
    "one pass, amsgrad": lambda params: Adam(params, lr=0.125, amsgrad=True),
    "one pass, momentum": functools.partial(SGD, lr=0.125, momentum=0.5, dampening=0.25),
    "one pass, sgd": functools.partial(SGD, lr=0.125),
    "one pass, lamb": functools.partial(FusedLAMB, lr=0.125),
}
# the reference of LAMB reads its step counters, which are on the CPU anyway
COUNTED = [name for name in ONE_PASS if name != "one pass, lamb"]


class Late:
    """A copy that has arrived when the one after it was made, or when it is waited for."""

    made: list["Late"] = []

    def __init__(self, source: Tensor) -> None:
        self._copy = source.clone()
        Late.made.append(self)

    def ready(self) -> bool:
        return Late.made[-1] is not self

    def wait(self) -> Tensor:
        return self._copy


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat the CPU as a device that works behind the host."""
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    if request.param:
        monkeypatch.setattr(device_scaler, "HostCopy", Late)
    yield
    Late.made.clear()


def start(amp: ModuleType, level: str, maker: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = {"verbosity": 0, "loss_scale": "dynamic", "growth_interval": 2, **options}
    settings = {"max_loss_scale": 1024.0, "fused_step": maker in ONE_PASS, **settings}
    make = {**MAKERS, **ONE_PASS}[maker]
    return amp.initialize(model, make(model.parameters()), opt_level=level, **settings)


def step(amp: ModuleType, model: nn.Module, optimizer: Optimizer, event: str = "finite") -> None:
    inputs = torch.linspace(-1, 1, 12).reshape(3, 4)
    factor = torch.inf if event == "overflow" else 1.0
    if event != "kept":
        optimizer.zero_grad()
    if event == "delayed":
        scaled_backward(amp, model(-inputs).square().sum(), optimizer, delay_unscale=True)
    scaled_backward(amp, model(inputs).square().sum() * factor, optimizer)
    if event == "dropped":
        model.zero_grad()
        return
    if event == "clipped":
        amp.clip_grad_norm_(optimizer, 0.25)
    if event == "strided":
        for master in amp.master_params(optimizer):
            master.grad = master.grad.t().contiguous().t()
    optimizer.step()


def outcome(amp: ModuleType, model: nn.Module, optimizer: Optimizer) -> list[Any]:
    # a step that its device skipped leaves counts of 0 where the host's leaves none
    counts = [float(entry.get("step", 0)) for entry in optimizer.state.values()]
    steps = [count for count in counts if count]
    numbers = session.scalers[0].state_dict(), session.scalers[0].numbers()
    return [model.state_dict(), steps, *numbers, amp.step_was_skipped(optimizer)]


# "kept" is what it is for: docs/mistakes.md, "Gradients of the last step"
@pytest.mark.filterwarnings("ignore:at a level with fp32 masters the gradients of a step")
@pytest.mark.usefixtures("ahead")
def test_training_is_that_of_a_host_that_waits(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @trains()
    @example("O2", "momentum", ["overflow", "kept"])
    @given(
        st.sampled_from(["O1", "O2", "O5"]),
        st.sampled_from(list(MAKERS)),
        st.lists(st.sampled_from(["finite", "overflow", "delayed", "dropped", "kept"]), max_size=6),
    )
    def run(level: str, maker: str, events: list[str]) -> None:
        outcomes = []
        for places in (set(), {"cpu"}):
            monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", places)
            model, optimizer = start(amp, level, maker)
            for event in events:
                step(amp, model, optimizer, event)
            outcomes.append(outcome(amp, model, optimizer))
            amp.deactivate()
        torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)

    run()


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("maker", MAKERS)
def test_no_step_asks_its_device_for_a_number_but_where_the_optimizer_has_to_be_told(
    amp: ModuleType, level: str, maker: str
) -> None:
    model, optimizer = start(amp, level, maker)
    step(amp, model, optimizer)
    for event in ("finite", "overflow", "delayed"):
        with CountItems() as items:
            step(amp, model, optimizer, event)
        assert items.count == (1 if maker == "foreach" else 0)


@pytest.mark.usefixtures("ahead")
def test_a_first_step_of_fused_momentum_is_not_left_to_the_device(amp: ModuleType) -> None:
    """torch leaves the momentum of a skipped first step as it was allocated."""
    model, optimizer = start(amp, "O1", "momentum")
    assert waits_of_a_step(amp, model, optimizer, "overflow") == 1
    assert not optimizer.state
    assert waits_of_a_step(amp, model, optimizer) == 1
    assert waits_of_a_step(amp, model, optimizer) == 0
    for entry in optimizer.state.values():
        entry["momentum_buffer"] = None  # of a loaded state
    assert waits_of_a_step(amp, model, optimizer, "overflow") == 1
    assert [entry["momentum_buffer"] for entry in optimizer.state.values()] == [None] * 4
    assert waits_of_a_step(amp, model, optimizer) == 1
    # what gets no gradient is not stepped
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert waits_of_a_step(amp, model, optimizer) == 0


def waits_of_a_step(
    amp: ModuleType, model: nn.Module, optimizer: Optimizer, event: str = "finite"
) -> int:
    with CountItems() as items:
        step(amp, model, optimizer, event)
    assert amp.step_was_skipped(optimizer) == (event == "overflow")
    return items.count


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("maker", FUSED)
def test_the_message_comes_when_the_outcome_does(
    amp: ModuleType, maker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = start(amp, "O1", maker)
    session.verbosity = 1
    step(amp, model, optimizer)
    step(amp, model, optimizer, "overflow")
    assert amp.loss_scale() == 512.0  # waits
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0"
    # which gradients is known where a kernel has flagged each of them
    assert capsys.readouterr().out.partition(";")[0].rstrip() == message
    assert amp.step_was_skipped(optimizer)
    step(amp, model, optimizer)
    assert not amp.step_was_skipped(optimizer)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("ahead")
def test_the_message_is_out_at_exit_and_after_deactivate(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for flush in (session.settle, amp.deactivate):
        model, optimizer = start(amp, "O1", "adamw")
        session.verbosity = 1
        step(amp, model, optimizer, "overflow")
        flush()
        assert "reducing loss scale to 512.0" in capsys.readouterr().out
        amp.deactivate()


@pytest.mark.usefixtures("ahead")
def test_a_step_has_one_line_however_many_of_its_losses_overflow(
    amp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = start(amp, "O1", "adamw", num_losses=2)
    session.verbosity = 1
    for loss_id in (1, 0, 1):
        loss = model(torch.ones(1, 4)).sum() * torch.inf
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    session.settle()
    message = "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 256.0"
    (said,) = capsys.readouterr().out.splitlines()
    assert said.partition("; not finite: ")[0] == message


LAST_STEP_OVERFLOWS = """
    import torch
    from amp_patch import amp
    from amp_patch.scaling import device_scaler
    from amp_patch.step import loss_scaling

    class Late:
        def __init__(self, source):
            self.copy = source.clone()
        def ready(self):
            return False
        def wait(self):
            return self.copy

    loss_scaling.RUNS_AHEAD, device_scaler.HostCopy = {"cpu"}, Late
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() * torch.inf, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("the last line")
"""


def test_the_message_of_the_last_step_comes_when_the_process_ends() -> None:
    command = [sys.executable, "-c", textwrap.dedent(LAST_STEP_OVERFLOWS)]
    root = Path(__file__).parents[2]
    run = processes.run(command, cwd=root)
    assert run.returncode == 0, run.stderr
    _, end = run.stdout.split("the last line\n")
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert end == f"{message}; not finite: weight (inf), bias (inf)\n"


@pytest.mark.usefixtures("ahead")
def test_the_error_at_the_floor_names_the_parameters_one_step_late_at_most(
    amp: ModuleType,
) -> None:
    model, optimizer = start(amp, "O1", "adamw", min_loss_scale=512.0)
    message = r"loss scaler 0 at its floor 512.0: 0.weight \(NaN\)"
    for _ in range(2):
        step(amp, model, optimizer, "overflow")
    with pytest.raises(FloatingPointError, match=message):
        overflow_thrice(amp, model, optimizer)


def overflow_thrice(amp: ModuleType, model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(3):
        step(amp, model, optimizer, "overflow")


@pytest.mark.usefixtures("ahead")
def test_a_closure_that_overflows_skips_the_step(amp: ModuleType) -> None:
    model, optimizer = start(amp, "O2", "adamw")
    step(amp, model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        scaled_backward(amp, loss * torch.inf, optimizer)
        return loss

    optimizer.step(closure)
    assert amp.step_was_skipped(optimizer)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(("level", "maker"), [("O1", "adamw"), ("O2", "one pass, adamw")])
@pytest.mark.parametrize("event", ["finite", "overflow"])
def test_gradients_that_are_put_back_are_looked_at_behind_an_overflow_alone(
    amp: ModuleType, level: str, maker: str, event: str
) -> None:
    model, optimizer = start(amp, level, maker)
    factors = (1.0, torch.inf if event == "overflow" else 1.0, 1.0)
    kept: list[list[Tensor]] = []
    for factor in factors:
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(2, 4)).sum() * factor, optimizer)
        kept.append([master.grad.clone() for master in amp.master_params(optimizer)])
    for master, grads in zip(amp.master_params(optimizer), zip(*kept, strict=True), strict=True):
        master.grad = sum(grads)
    optimizer.step()
    assert amp.step_was_skipped(optimizer) == (event == "overflow")
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.usefixtures("ahead")
def test_the_graph_of_a_loss_is_not_held_until_its_outcome(amp: ModuleType) -> None:
    model, optimizer = start(amp, "O1", "adamw")
    loss = model(torch.ones(2, 4)).sum()
    node = weakref.ref(loss)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    del loss, scaled_loss
    assert node() is None


def test_flags_add_up() -> None:
    skip = Skip(print)
    assert not skip.is_possible
    assert not skip.found()
    skip.ask_where(torch.zeros(1))
    assert skip.is_possible
    assert not skip.found()
    skip.ask_where(torch.ones(1))
    skip.ask_where(torch.zeros(1))
    assert skip.found()
    skip.forget()
    assert not skip.is_possible


def test_a_reason_of_the_host_is_said_when_the_step_is_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip = Skip(print)
    skip.ask("too large")
    assert skip.found()
    assert capsys.readouterr().out == ""
    skip.note_skipped()
    assert capsys.readouterr().out == "too large\n"
    assert skip.was_skipped
    assert not skip.is_possible
    skip.note_made(None)
    assert not skip.was_skipped


@pytest.mark.parametrize("is_made", [True, False])
def test_an_overflow_is_known_until_the_step_though_it_was_cleared(is_made: bool) -> None:
    skip = Skip(lambda _: None)
    for ask in (lambda: skip.ask("of the host"), lambda: skip.ask_where(torch.ones(1))):
        assert not skip.has_overflowed()
        ask()
        assert skip.has_overflowed()
        skip.forget_cleared()
        skip.ask_where(torch.zeros(1))  # of the next block
        assert skip.has_overflowed()
        skip.note_made(None) if is_made else skip.note_skipped()
    assert not skip.has_overflowed()


def test_a_line_waits_for_the_step_and_for_every_outcome() -> None:
    said: list[str] = []
    skip, ones, others = Skip(said.append), LossScaler(ScaleRule()), LossScaler(ScaleRule())
    first, second, third = (skip.expect(one) for one in (ones, others, ones))
    second("of the others")
    skip.ask_where(torch.ones(1))
    skip.note_made(skip.flag)
    third("the last of the first")
    assert said == []
    first("the first")
    assert said == ["the last of the first"]
    finite = skip.expect(ones)
    skip.note_skipped()
    finite(None)
    dropped = skip.expect(ones)
    skip.forget()  # the gradients were cleared: no step was skipped
    dropped("dropped")
    assert said == ["the last of the first"]


def test_a_step_that_was_given_a_flag_is_asked_about_later() -> None:
    skip = Skip(print)
    for flag in (1.0, 0.0):
        skip.ask_where(torch.tensor([flag]))
        skip.note_made(skip.flag)
        assert not skip.is_possible
        assert skip.was_skipped == bool(flag)


# --- fused_step=True ---


EVENTS = ["finite", "overflow", "delayed", "dropped", "clipped", "strided"]


@pytest.mark.usefixtures("ahead", "gpu")
def test_kernels_skip_as_a_host_that_waits(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @trains()
    @given(
        st.sampled_from(["O2", "O5"]),
        st.sampled_from(list(ONE_PASS)),
        st.lists(st.sampled_from(EVENTS), max_size=5),
    )
    def run(level: str, maker: str, events: list[str]) -> None:
        outcomes = []
        for places in (set(), {"cpu"}):
            monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", places)
            model, optimizer = start(amp, level, maker)
            for event in events:
                step(amp, model, optimizer, event)
            halves = [param.detach().clone() for param in model.parameters()]
            outcomes.append([outcome(amp, model, optimizer), halves])
            amp.deactivate()
        torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0)

    run()


@pytest.mark.usefixtures("ahead", "gpu")
@pytest.mark.parametrize("maker", ONE_PASS)
def test_kernels_wait_for_no_flag(amp: ModuleType, maker: str) -> None:
    model, optimizer = start(amp, "O2", maker)
    with CountItems() as items:
        step(amp, model, optimizer)
    assert items.count == (maker == "one pass, momentum")  # its buffers are made then
    for event in ("finite", "overflow", "clipped", "delayed"):
        with CountItems() as items:
            step(amp, model, optimizer, event)
        assert items.count == 0
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("maker", COUNTED)
@pytest.mark.parametrize("event", ["finite", "overflow", "clipped", "delayed"])
def test_the_reference_waits_once(amp: ModuleType, maker: str, event: str) -> None:
    model, optimizer = start(amp, "O2", maker)
    step(amp, model, optimizer)
    with CountItems() as items:
        step(amp, model, optimizer, event)
    assert items.count == 1
    assert amp.step_was_skipped(optimizer) == (event == "overflow")


@pytest.mark.usefixtures("ahead", "gpu")
@pytest.mark.parametrize("maker", COUNTED)
@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_what_kernels_do_not_take_waits_at_most_once(
    amp: ModuleType, maker: str, factor: float
) -> None:
    model, optimizer = start(amp, "O2", maker)
    step(amp, model, optimizer)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(3, 4)).square().sum() * factor, optimizer) as loss:
        loss.backward()
    for master in amp.master_params(optimizer):
        master.grad = master.grad.t().contiguous().t()
    with CountItems() as items:
        optimizer.step()
    # torch's fused kernel takes the flag
    assert items.count == (not optimizer.param_groups[0].get("fused"))
    assert amp.step_was_skipped(optimizer) == (factor != 1.0)
    after = list(amp.master_params(optimizer))
    assert all(map(torch.equal, before, after)) == (factor != 1.0)


@pytest.mark.usefixtures("ahead", "gpu")
def test_a_skipped_first_step_leaves_no_momentum(amp: ModuleType) -> None:
    model, optimizer = start(amp, "O2", "one pass, momentum")
    step(amp, model, optimizer, "overflow")
    assert not any(optimizer.state.values())
    assert amp.step_was_skipped(optimizer)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_a_closure_that_clears_forgets_what_was_found_before(
    amp: ModuleType, factor: float
) -> None:
    model, optimizer = start(amp, "O2", "adamw")
    with amp.scale_loss(model(torch.ones(2, 4)).sum() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        scaled_backward(amp, loss, optimizer)
        return loss

    optimizer.step(closure)
    assert not amp.step_was_skipped(optimizer)
    assert {entry["step"].item() for entry in optimizer.state.values()} == {1.0}


CLEARS: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "None": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "the model's": lambda model, optimizer: model.zero_grad(),
    "zeros of the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_cleared_gradients_of_skipped_steps_are_not_taken_for_left_ones(
    amp: ModuleType, level: str, clear: str, blocks: int
) -> None:
    """As where a dynamic scale begins: to see that they are not would wait in all later steps."""
    model, optimizer = start(amp, level, "adamw")
    for factor in (torch.inf, torch.inf, 1.0, 1.0):
        CLEARS[clear](model, optimizer)
        for _ in range(blocks):
            loss = model(torch.ones(3, 4)).square().sum() * factor
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        skip = session.optimizers.steps[optimizer].skip
        assert skip.left.value is False
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (factor != 1.0)


@pytest.mark.usefixtures("ahead")
def test_gradients_of_a_skipped_step_that_are_left_are_added_to(amp: ModuleType) -> None:
    model, optimizer = start(amp, "O1", "adamw")
    for factor in (torch.inf, 1.0):
        loss = model(torch.ones(3, 4)).square().sum() * factor
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_what_overflowed_and_was_cleared_stays_known_whatever_is_cleared_later(
    later: float,
) -> None:
    skip = Skip(print)
    skip.ask("an overflow")
    skip.forget_cleared()
    skip.ask_where(torch.tensor([later]))
    skip.forget_cleared()
    assert skip.cleared.known()


@pytest.mark.parametrize("flag", [0.0, 1.0, 2.0])
def test_what_a_device_has_found_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, flag: float
) -> None:
    outcome = Outcome(HostCopy(torch.tensor(flag)))
    assert isinstance(outcome.value, HostCopy)
    assert outcome.known() is (flag != 0.0)
    monkeypatch.setattr(HostCopy, "wait", None)
    assert outcome.known() is outcome.value is (flag != 0.0)
