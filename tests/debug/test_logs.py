"""Steps reach TensorBoard, Weights & Biases and ``logging``; a logger never ends the training."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from support import scaled_backward
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.tensorboard import SummaryWriter

from amp_patch.debug import logs as logs_module
from amp_patch.debug.logs import StepLog
from amp_patch.debug.sinks import Record
from amp_patch.session import session
from amp_patch.step.skip import Outcome

INF = float("inf")
#: Factors of the loss: the second and the third step overflow.
FACTORS = (1.0, INF, INF, 1.0)


class Notes:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sources: list[tuple[int, str]] = []
        self.is_closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)

    def write_sources(self, step: int, sources: str) -> None:
        self.sources.append((step, sources))

    def close(self) -> None:
        self.is_closed = True


def prepared(amp: ModuleType, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    options = {"opt_level": "O1", "loss_scale": "dynamic", "verbosity": 0, **options}
    return amp.initialize(model, optimizer, max_loss_scale=1024.0, **options)


def train(amp: ModuleType, model: nn.Module, optimizer: Any, factors=FACTORS, **options) -> None:
    for factor in factors:
        optimizer.zero_grad()
        scaled_backward(amp, model(torch.ones(1, 2)).sum() * factor, optimizer, **options)
        optimizer.step()


def read(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return what TensorBoard itself reads in a folder, by tags."""
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    texts = {
        tag.removesuffix("/text_summary"): [
            (one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }
    return scalars | texts


SCALES = [(1, 1024.0), (2, 1024.0), (3, 512.0), (4, 256.0)]
SKIPPED = [(1, 0.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_tensorboard_reads_scales_skips_and_sources(amp, tmp_path: Path, level: str) -> None:
    model, optimizer = prepared(amp, opt_level=level, tensorboard=tmp_path / "runs")
    train(amp, model, optimizer)
    amp.deactivate()
    written = read(tmp_path / "runs")
    assert written["amp/skipped_steps"] == SKIPPED
    assert written["amp/loss_scale"] == SCALES
    assert [step for step, _ in written["amp/overflow"]] == [2, 3]
    assert all("1.weight (" in text for _, text in written["amp/overflow"])
    assert set(written) == {"amp/skipped_steps", "amp/loss_scale", "amp/overflow"}


def test_a_writer_of_the_script_stays_open(amp, tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    model, optimizer = prepared(amp, tensorboard=writer)
    train(amp, model, optimizer, [1.0])
    amp.deactivate()
    assert read(tmp_path)["amp/loss_scale"] == [(1, 1024.0)]  # flushed
    writer.add_scalar("mine", 1.0, 1)
    writer.close()
    assert read(tmp_path)["mine"] == [(1, 1.0)]


def test_each_scaler_has_a_curve_over_its_optimizers_steps(amp, tmp_path: Path) -> None:
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(
        models,
        optimizers,
        opt_level="O1",
        max_loss_scale=1024.0,
        num_losses=2,
        verbosity=0,
        tensorboard=str(tmp_path),
    )
    train(amp, models[0], optimizers[0], [1.0, 1.0])
    train(amp, models[1], optimizers[1], [1.0, INF, 1.0], loss_id=1)
    amp.deactivate()
    written = read(tmp_path)
    assert written["amp/loss_scale"] == [(1, 1024.0), (2, 1024.0)]
    assert written["amp/loss_scale_1"] == [(1, 1024.0), (2, 1024.0), (3, 512.0)]
    assert written["amp/skipped_steps"][-1] == (3, 1.0)


# --- Weights & Biases ---


class Run:
    """The part of a wandb run that is called."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any], commit: bool = True) -> None:
        assert not commit  # the script's own steps stay as they are
        self.logged.append(values)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("wandb")
    module.run = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_same_over_a_step_of_its_own(amp, wandb) -> None:
    model, optimizer = prepared(amp, wandb=True)
    wandb.run = Run()  # by wandb.init(), which may come later
    train(amp, model, optimizer)
    logged = wandb.run.logged
    assert [(one["amp/step"], one["amp/loss_scale"]) for one in logged] == SCALES
    assert [(one["amp/step"], one["amp/skipped_steps"]) for one in logged] == SKIPPED
    assert ["amp/overflow" in one for one in logged] == [False, True, True, False]
    assert "1.weight (" in logged[1]["amp/overflow"]
    assert wandb.run.axes == [("amp/*", "amp/step")]


def test_a_run_may_be_given(amp) -> None:
    run = Run()
    model, optimizer = prepared(amp, wandb=run)
    train(amp, model, optimizer, [1.0])
    assert run.logged == [{"amp/loss_scale": 1024.0, "amp/skipped_steps": 0, "amp/step": 1}]


def test_without_a_run_one_warning_says_what_to_call(amp, wandb) -> None:
    model, optimizer = prepared(amp, wandb=True)
    message = r"wandb=\.\.\..*RuntimeError.*call wandb\.init\(\)"
    with pytest.warns(UserWarning, match=message) as got:
        train(amp, model, optimizer)
    assert len(got) == 1


# --- logging ---


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == level]


@pytest.mark.parametrize("given", [logging.getLogger("mine"), "mine", True])
def test_logging_warns_of_skips_and_tells_of_moves(amp, caplog, given: Any) -> None:
    caplog.set_level(logging.DEBUG)
    model, optimizer = prepared(amp, logger=given)
    train(amp, model, optimizer, (*FACTORS, 1.0))
    warned = lines(caplog, logging.WARNING)
    assert len(warned) == 2
    begin = "step 2 skipped after an overflow at loss scale 1024.0: 0.weight ("
    assert warned[0].startswith(begin)
    assert lines(caplog, logging.INFO) == [
        "step 1: loss scale 0 is 1024.0",
        "step 3: loss scale 0 is 512.0",
        "step 4: loss scale 0 is 256.0",
    ]
    assert lines(caplog, logging.DEBUG) == ["step 5: loss scale 256.0"]
    assert {one.name for one in caplog.records} == {"amp_patch" if given is True else "mine"}


def test_what_many_parameters_have_is_cut(amp, caplog) -> None:
    model, optimizer = prepared(amp, logger=True)
    train(amp, model, optimizer, [INF])
    (warned,) = lines(caplog, logging.WARNING)
    assert warned.count("(") == 3
    assert warned.endswith(" and 1 more")


# --- what ends it, and what does not ---


def test_deactivate_ends_it(amp, caplog, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    model, optimizer = prepared(amp, logger="mine", tensorboard=tmp_path)
    amp.deactivate()
    assert not session.observers
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(amp, model, optimizer)
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []  # made by the first step


@pytest.mark.slow(instead="what is written at each step, and by deactivate()")
def test_what_is_not_deactivated_is_written_when_the_process_ends(tmp_path: Path) -> None:
    program = """
        import torch
        from amp_patch import amp
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, tensorboard="runs")
        for _ in range(3):
            with amp.scale_loss(model(torch.ones(1, 2)).sum() * 1e-3, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    """
    run = processes.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert [step for step, _ in read(tmp_path / "runs")["amp/loss_scale"]] == [1, 2, 3]


def test_a_step_with_a_closure_is_logged(amp) -> None:
    run = Run()
    model, optimizer = prepared(amp, wandb=run)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        scaled_backward(amp, loss, optimizer)
        return loss

    optimizer.step(closure)
    assert [one["amp/step"] for one in run.logged] == [1]


def test_micro_batches_are_one_step(amp) -> None:
    run = Run()
    model, optimizer = prepared(amp, wandb=run)
    for is_last in (False, False, True):
        loss = model(torch.ones(1, 2)).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=not is_last) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert run.logged == [{"amp/loss_scale": 1024.0, "amp/skipped_steps": 0, "amp/step": 1}]


def test_a_second_call_replaces_its_logger_and_leaves_the_other(amp, caplog) -> None:
    run = Run()
    model, optimizer = prepared(amp, logger="first", wandb=run)
    prepared(amp, logger="second")
    train(amp, model, optimizer, [1.0])
    assert {one.name for one in caplog.records} == {"second"}
    assert len(run.logged) == 1


def test_disabled_logs_nothing(amp, tmp_path: Path) -> None:
    model, optimizer = prepared(amp, enabled=False, tensorboard=tmp_path)
    train(amp, model, optimizer, [1.0])
    assert list(tmp_path.iterdir()) == []


class FullDisk(SummaryWriter):
    def __init__(self) -> None:
        self.calls = 0

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")


def test_a_logger_that_fails_warns_once_and_training_goes_on(amp, caplog) -> None:
    disk = FullDisk()
    model, optimizer = prepared(amp, tensorboard=disk, logger=True)
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"tensorboard=\.\.\..*OSError.*No space left") as warned:
        train(amp, model, optimizer)
    assert len(warned) == 1
    assert disk.calls == 1
    assert not torch.equal(model[0].weight, before)
    assert len(lines(caplog, logging.WARNING)) == 2  # the other goes on
    amp.deactivate()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensorboard": 3}, TypeError, r"a folder or a SummaryWriter; got 3 .*tensorboard='runs"),
        ({"tensorboard": __file__}, ValueError, r"a folder or .*; got a file, .*test_logs\.py"),
        ({"wandb": "name"}, TypeError, r"True or a run .*; got 'name' .*wandb\.init\(\)"),
        ({"logger": print}, TypeError, r"a logging\.Logger, .*; got <built-in .*getLogger"),
        ({"wandb": True}, ImportError, r"wandb=True\) needs the package wandb.*pip install wandb"),
    ],
)
def test_bad_input_is_refused_before_anything_is_changed(
    amp, monkeypatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    linear = F.linear
    with pytest.raises(error, match=message):
        prepared(amp, **options)
    assert F.linear is linear
    assert not session.observers
    assert not session.initialized


def test_tensorboard_that_is_missing_is_named(amp, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install tensorboard"):
        prepared(amp, tensorboard=tmp_path)


@pytest.mark.parametrize(("rank", "steps"), [(0, 4), (1, 0)])
def test_only_the_first_rank_writes(amp, monkeypatch, rank: int, steps: int) -> None:
    run = Run()
    model, optimizer = prepared(amp, wandb=run)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    train(amp, model, optimizer)
    assert len(run.logged) == steps


# --- a device that runs ahead ---


class LateCopy:
    """A copy that arrives when it is told to."""

    def __init__(self, source: Any) -> None:
        self.value = torch.as_tensor(source, dtype=torch.float32)
        self.has_arrived = False
        self.waited = False

    def ready(self) -> bool:
        return self.has_arrived

    def wait(self) -> Tensor:
        self.waited |= not self.has_arrived
        return self.value


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopy]:
    """Give the copies that are made, in order."""
    made: list[LateCopy] = []

    class Noted(LateCopy):
        def __init__(self, source: Any) -> None:
            super().__init__(source)
            made.append(self)

    monkeypatch.setattr(logs_module, "HostCopy", Noted)
    return made


@pytest.fixture
def step(late: list[LateCopy]) -> Callable[[StepLog, bool], LateCopy]:
    """Give what makes a step on a device; returns the copy of its outcome."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def step(log: StepLog, is_skipped: bool) -> LateCopy:
        log.scaled(torch.zeros(()), torch.tensor(8.0), 0, [optimizer])
        late[-1].has_arrived = True
        outcome = logs_module.HostCopy(is_skipped)
        log.stepped(optimizer, SimpleNamespace(outcome=Outcome(outcome)))
        return outcome

    return step


class FakeCheck:
    def nonfinite(self) -> list[tuple[int, str]]:
        return [(0, "inf")]


FOUND = [(FakeCheck(), [torch.zeros(3)])]
SOURCES = "a parameter of shape (3,) (inf)"


def test_nobody_waits_for_a_device_and_steps_stay_in_order(step) -> None:
    notes = Notes()
    log = StepLog("logger", notes)
    first, second = step(log, False), step(log, False)
    second.has_arrived = True
    step(log, False)
    assert notes.records == []
    first.has_arrived = True
    third = step(log, True)
    assert [record.number for record in notes.records] == [1, 2]
    assert not first.waited
    assert notes.records[0] == Record(1, {0: 8.0}, False, 0, None)
    log.finish()
    assert third.waited
    assert [one.number for one in notes.records] == [1, 2, 3, 4]
    assert [one.skipped_steps for one in notes.records] == [0, 0, 0, 1]
    assert notes.is_closed


def test_sources_that_come_while_a_step_waits_go_with_it(step) -> None:
    notes = Notes()
    log = StepLog("logger", notes)
    outcome = step(log, True)
    step(log, False)
    log.overflowed(0, FOUND)
    outcome.has_arrived = True
    log.finish()
    assert [one.sources for one in notes.records] == [SOURCES, None]
    assert notes.sources == []


def test_sources_that_come_after_it_was_written_are_written_of_that_step(step) -> None:
    notes = Notes()
    log = StepLog("logger", notes)
    step(log, True).has_arrived = True
    step(log, False).has_arrived = True
    log.overflowed(0, FOUND)
    step(log, False).has_arrived = True
    log.finish()
    assert [one.sources for one in notes.records] == [None, None, None]
    assert notes.sources == [(1, SOURCES)]


@pytest.mark.filterwarnings("ignore:at a level with a loss scale")
def test_a_step_without_scale_loss_is_none_of_amps(amp) -> None:
    run = Run()
    model, optimizer = prepared(amp, wandb=run)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert run.logged == []


# --- the page of the documentation ---


def test_the_page_says_what_is_written(amp, monkeypatch, tmp_path: Path, caplog) -> None:
    page = (Path(__file__).parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging, "basicConfig", lambda level: caplog.set_level(level))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, "docs/logging.md", "exec"), namespace)
    steps = [step for step, _ in read(tmp_path / "runs" / "first")["amp/loss_scale"]]
    assert steps == list(range(1, 21))
    model, optimizer = namespace["model"], namespace["optimizer"]
    for factor in (1e-3, INF, 1e-3):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 8)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    ours = [one for one in caplog.records if one.name == "amp_patch"]
    said = [f"{one.levelname}:{one.name}:{one.getMessage()}" for one in ours]
    shown = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL).group(1)
    assert said == shown.splitlines()
