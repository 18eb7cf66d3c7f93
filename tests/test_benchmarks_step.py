"""The benchmark of whole steps runs, as far as a CPU goes, and keeps, judges and draws its rows."""

import importlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import processes
import pytest
import torch
from benchmarks import kernel_report, step
from benchmarks.rounds import Spread
from benchmarks.whole_step import models as step_models
from benchmarks.whole_step import plot as step_plot
from benchmarks.whole_step import report as step_report
from benchmarks.whole_step import results as step_results
from benchmarks.whole_step import timing
from benchmarks.whole_step.candidates import BASELINE, CANDIDATES, FUSED_BASELINE, stepping, tf32
from benchmarks.whole_step.comparison import Comparison
from benchmarks.whole_step.models import BERT, MLP, MODELS, Batch, Maker, Workload
from benchmarks.whole_step.processes import Failed, Process
from benchmarks.whole_step.results import Results
from benchmarks.whole_step.row import Key, Measured, Row
from benchmarks.whole_step.timing import STEPS, TINY_STEPS, Prepared, Stepping, first_line
from cuda_on_cpu.fake_graphs import FakeCuda
from pages import DOCS, text_of
from torch import Tensor, nn
from torch.nn import functional as F

O2 = Key("eager", BERT, "O2")


class Here:
    """Calls the methods of a `Stepping` in this process, as `Process` does in another."""

    def __init__(self, device: str = "cpu", tiny: bool = True) -> None:
        self._stepping = Stepping(device, tiny)
        self._has_ended = False

    def call(self, method: str, *arguments: Any) -> Any:
        assert not self._has_ended, "it must not be asked again"
        try:
            return getattr(self._stepping, method)(*arguments)
        except Exception as error:
            self._has_ended = True
            raise Failed(self, first_line(error)) from None

    def end(self) -> None:
        self._has_ended = True
        self._stepping.drop()


class Script:
    """Runs step.py in this process: tiny, on the CPU.

    Attributes:
        measured: the rows that were measured, in their order.
        seconds: that each of them takes, by the clock of the script.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.out, self.seconds, self._now = folder / "results", 0.0, 0.0
        self.measured: list[Key] = []
        measure = Comparison.row

        def row(comparison: Comparison, key: Key) -> Row:
            self.measured.append(key)
            self._now += self.seconds
            return measure(comparison, key)

        monkeypatch.setattr(Comparison, "row", row)
        monkeypatch.setattr(step, "Process", Here)
        monkeypatch.setattr(step.time, "monotonic", lambda: self._now)

    def run(self, *arguments: str) -> int:
        fixed = ("--device", "cpu", "--tiny", "--only", "mlp", "--rounds", "2")
        self.measured.clear()
        return step.main([*fixed, "--out", str(self.out), *arguments])

    def saved(self) -> dict[str, Any]:
        return json.loads((self.out / "step-CPU.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(amp: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    return Script(monkeypatch, tmp_path)


def test_each_candidate_in_each_mode_gets_a_row_with_ratios_to_the_baseline(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.run("--modes", "eager") == 0
    compiled = (BASELINE, "O2")
    assert script.run("--candidates", *compiled) == 0
    rows = {(one["mode"], one["candidate"]): one for one in script.saved()["rows"]}
    assert list(rows) == [
        *(("eager", name) for name in CANDIDATES),
        *(("compiled", name) for name in compiled),
    ]
    for row in rows.values():
        assert (row["model"], row["error"], row["steps"]) == (MLP, None, TINY_STEPS)
        own, baseline = row["own"], row["baseline"]
        assert own["samples_per_second"] > 0
        assert row["ratios"]["speed"] == row["speed"]["median"] > 0
        assert row["ratios"]["final_loss"] == own["final_loss"] / baseline["final_loss"]
        assert baseline["final_loss"] == rows["eager", BASELINE]["own"]["final_loss"]
        assert own["final_loss"] == pytest.approx(baseline["final_loss"], rel=0.02)
        assert row["ratios"]["peak_bytes"] is row["ratios"]["launches"] is None
    printed = capsys.readouterr().out
    for mode, name in rows:
        assert f"\n| {mode:8} | {name:27} |" in printed
    why = "there are CUDA graphs on a CUDA device only"
    assert f"- graphed; {MLP}; {', '.join(compiled)}: {why}" in printed
    assert (script.out / "step-CPU.md").read_text(encoding="utf-8") in printed
    assert "not measured" in printed


@pytest.mark.slow(instead="the same in this process; such a process that answers, dies or hangs")
def test_candidates_and_the_baseline_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    few = ("--device", "cpu", "--tiny", "--only", "mlp", "--modes", "eager", "--rounds", "1")
    assert step.main([*few, "--candidates", BASELINE, "O2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "step-CPU.json").read_text())["rows"]
    assert [(row["candidate"], row["error"]) for row in rows] == [(BASELINE, None), ("O2", None)]
    assert multiprocessing.active_children() == []


def test_the_script_starts_from_anywhere_and_writes_nothing_where_it_is_tiny() -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, step.__file__, "--device", "cpu", "--tiny", "--minutes", "0"]
    results = set(step.RESULTS.iterdir())
    done = processes.run(command, cwd=Path("/"), env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("0 rows measured, 0 could not be, 270 not tried")
    assert set(step.RESULTS.iterdir()) == results


def test_a_process_that_dies_or_fails_gives_a_reason() -> None:
    process = Process("cpu", True)
    with pytest.raises(Failed, match="^KeyError: 'no such model'$"):
        process.call("prepare", "no such model", BASELINE, "eager")
    assert process.process.pid is not None
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(Failed, match="^its process ended with exit code -9$") as failed:
        process.call("block")
    assert failed.value.caller is process
    process.end()


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.whole_step import processes as step_processes

    monkeypatch.setattr(step_processes, "PATIENCE", 0.01)
    process = Process("cpu", True)
    with pytest.raises(Failed, match=r"^no answer from block\(\) within 0 s$"):
        process.call("block")  # it has not even started
    process.process.join(10)
    assert process.process.exitcode == -signal.SIGKILL
    process.end()


class Turns:
    """A `Caller` whose steps take fixed times.

    Attributes:
        seconds: of a step in each block.
        calls: what it was asked, after its name.
    """

    def __init__(self, name: str, seconds: Sequence[float], calls: list[str]) -> None:
        self._name, self._seconds, self._calls = name, iter(seconds), calls

    def call(self, method: str, *arguments: Any) -> Any:
        self._calls.append(f"{self._name} {method}")
        if method == "prepare":
            return Prepared("AdamW()", samples=6, steps=40, final_loss=2.0, peak_bytes=5)
        return next(self._seconds, 1.0) if method == "block" else 7

    def end(self) -> None:
        self._calls.append(f"{self._name} end")


def test_the_baseline_takes_turns_with_a_candidate_and_stays_for_the_next() -> None:
    calls: list[str] = []
    baseline = Turns("baseline", [9.0, 1.0, 2.0, 9.0, 3.0, 3.0], calls)
    own = Turns("own", [1.0, 0.5, 0.5, 1.0, 3.0, 3.0], calls)
    started = iter([own, baseline])
    comparison = Comparison(lambda: next(started), rounds=2)
    row = comparison.row(Key("eager", MLP, "O2"))
    blocks = ["own block", "baseline block"]
    assert calls[:2] == ["baseline prepare", "own prepare"]
    assert calls[2:8] == [*blocks, *reversed(blocks), *blocks]
    assert calls[8:] == ["own launches", "baseline launches"]
    # not of the first round
    assert row.speed == Spread(3.0, 2.5, 3.5, 2.0, 4.0)
    assert row.own == Measured(12.0, 5, 7, 2.0)
    assert row.baseline == Measured(4.0, 5, 7, 2.0)
    calls.clear()
    assert comparison.row(Key("compiled", MLP, "O2")).ratio("speed") == 1.0
    assert calls == ["own prepare", *blocks, *reversed(blocks), *blocks, "own launches"]
    calls.clear()
    comparison.row(Key("eager", BERT, "O2"))
    assert calls[:3] == ["own drop", "baseline prepare", "own prepare"]
    comparison.end()
    assert calls[-2:] == ["own end", "baseline end"]


def fails_in_half(model: nn.Module, batch: Batch) -> Tensor:
    if next(model.parameters()).dtype is torch.float16:
        raise torch.OutOfMemoryError("no memory is left\nfor anybody")
    return model(batch["inputs"]).square().mean()


def made_up(_: bool) -> Workload:
    return Workload(nn.Linear(2, 2), {"inputs": torch.ones(3, 2)}, fails_in_half, 3, 1e-3)


@pytest.mark.slow(instead="a process that fails, and gives its reason")
def test_a_candidate_that_fails_stops_no_other(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, MLP, Maker(made_up))
    assert script.run("--modes", "eager") == 0
    errors = {row["candidate"]: row["error"] for row in script.saved()["rows"]}
    failed = {"O2", "O2 fused_step", "O2, AdamW fused", "O3"}
    assert errors == {
        name: "OutOfMemoryError: no memory is left" if name in failed else None
        for name in CANDIDATES
    }
    script.run("--modes", "eager")
    assert script.measured == []
    script.run("--modes", "eager", "--retry")
    assert {key.candidate for key in script.measured} == failed


def refuses(_: bool) -> NoReturn:
    raise ValueError("no such thing")


def test_a_baseline_that_fails_is_not_tried_again(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, MLP, Maker(refuses))
    prepared: list[Any] = []
    call = Here.call
    monkeypatch.setattr(Here, "call", lambda *args: (prepared.append(args), call(*args))[1])
    assert script.run("--modes", "eager", "--candidates", BASELINE, "O2") == 0
    assert len(prepared) == 1
    assert [row["error"] for row in script.saved()["rows"]] == [
        "the baseline: ValueError: no such thing"
    ] * 2


def test_launches_that_cannot_be_counted_cost_no_row(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Stepping] = []

    def launches(stepping: Stepping) -> int:
        asked.append(stepping)
        raise RuntimeError("no profiler")

    monkeypatch.setattr(Stepping, "launches", launches)
    assert script.run("--modes", "eager", "--candidates", BASELINE, "O1") == 0
    assert len(asked) == 1
    assert all(row["speed"] for row in script.saved()["rows"])
    said = "launches are counted no more, eager: RuntimeError: no profiler"
    assert said in capsys.readouterr().out


def test_a_run_goes_on_where_the_last_one_was_cut_off(script: Script) -> None:
    few = ("--modes", "eager", "--candidates", BASELINE, "O1")
    script.seconds = 40.0
    assert script.run(*few, "--minutes", "0.5") == 0
    assert script.measured == [Key("eager", MLP, BASELINE)]
    (first,) = script.saved()["rows"]
    reasons = {one["why"]: one["candidates"] for one in script.saved()["not measured"]}
    assert reasons["the 0.5 minutes were over"] == ["O1"]

    assert script.run(*few) == 0
    assert script.measured == [Key("eager", MLP, "O1")]
    assert script.saved()["rows"][0] == first
    assert "the 0.5 minutes were over" not in str(script.saved())

    assert script.run(*few) == 0
    assert script.measured == []
    assert len(script.saved()["rows"]) == 2

    assert script.run(*few, "--again") == 0
    assert script.measured == [Key("eager", MLP, BASELINE), Key("eager", MLP, "O1")]
    assert script.saved()["rows"][0] != first


def test_what_was_not_reached_says_so_also_where_the_run_is_cut_off(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "line_of", cut_off)  # after the first row
    with pytest.raises(KeyboardInterrupt):
        script.run("--modes", "eager", "--candidates", BASELINE, "O1")
    assert [row["candidate"] for row in script.saved()["rows"]] == [BASELINE]
    missing = [one for one in script.saved()["not measured"] if "cut off" in one["why"]]
    assert [one["candidates"] for one in missing] == [["O1"]]


def test_rows_of_another_machine_are_not_mixed_with_these(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--modes", "eager", "--candidates")
    script.run(*few, BASELINE)
    about = script.saved()["about"]
    monkeypatch.setattr(step, "about", lambda *_: {**about, "torch": "9.0", "date": "another"})
    with pytest.raises(SystemExit) as exit_of:
        script.run(*few, "O1")
    assert exit_of.value.code == 2
    assert f"with torch {torch.__version__} and 9.0. Give another --out" in capsys.readouterr().err
    assert script.run(*few, "O1", "--again") == 0
    assert [row["candidate"] for row in script.saved()["rows"]] == ["O1"]


def test_a_model_whose_package_is_missing_is_left_out_and_named(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_models.importlib.util, "find_spec", lambda name: None)
    assert script.run("--only", "bert", "gat", "mlp", "--candidates", "fp32") == 0
    assert {key.model for key in script.measured} == {MLP}
    printed = capsys.readouterr().out
    assert f"- eager; {BERT}, BERT-base batch 8; fp32: transformers is missing" in printed
    assert "- eager; GAT; fp32: torch_geometric is missing" in printed


def test_tf32_is_really_off_and_then_as_it_was() -> None:
    owners = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [owner.allow_tf32 for owner in owners]
    for allowed in (True, False):
        with tf32(allowed):
            assert [owner.allow_tf32 for owner in owners] == [allowed] * 2
        assert [owner.allow_tf32 for owner in owners] == before


@pytest.mark.parametrize("name", ["TF32", "fp32", BASELINE, "O2"])
def test_products_are_in_tf32_for_the_candidate_of_that_name_alone(
    amp: ModuleType, name: str
) -> None:
    with stepping(CANDIDATES[name], step_models.made(MLP, tiny=True), "eager"):
        assert torch.backends.cudnn.allow_tf32 is (name == "TF32")


def test_nothing_of_amp_patch_is_left_for_the_next_candidate() -> None:
    before = F.linear
    with stepping(CANDIDATES["O1"], step_models.made(MLP, tiny=True), "eager"):
        assert F.linear is not before
    assert F.linear is before


@pytest.mark.parametrize("name", [FUSED_BASELINE, "O1", "O2", "O2 fused_step"])
def test_replays_of_a_captured_step_count_as_steps(cuda: FakeCuda, name: str) -> None:
    stepping = Stepping("cpu", tiny=True)
    eager = stepping.prepare(MLP, name, "eager")
    graphed = stepping.prepare(MLP, name, "graphed")
    assert graphed.steps == eager.steps == TINY_STEPS
    assert graphed.final_loss == pytest.approx(eager.final_loss, rel=1e-3)
    assert ("capturable" in graphed.optimizer) is (name != "O2 fused_step")
    stepping.drop()


class FakeMemory:
    """What a `Stepping` asks of ``torch.cuda``; an event comes 3 ms after the one before it.

    Attributes:
        reserved: bytes, of the 300 that there are.
        calls: the names of what was called, and "step" for each step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stepping: Stepping) -> None:
        self.reserved = 100
        self.calls: list[str] = []
        event = type("Event", (), {"record": print, "synchronize": print})
        event.elapsed_time = lambda self, other: 3.0
        fakes: dict[str, Any] = {
            "Event": lambda enable_timing: event(),
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: self.calls.append("reset"),
            "max_memory_allocated": lambda device: len(self.calls),
            "get_device_properties": lambda device: SimpleNamespace(total_memory=300),
            "memory_reserved": lambda device: self.reserved,
            "empty_cache": lambda: self.calls.append("empty"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(stepping, "_is_cuda", True)
        monkeypatch.setitem(MODELS, MLP, Maker(lambda tiny: made_up(tiny)._replace(loss=self.loss)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.calls.append("step")
        return model(batch["inputs"]).square().mean()


def test_on_a_gpu_the_peak_is_that_of_steps_and_events_tell_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepping = Stepping("cpu", tiny=True)
    cuda = FakeMemory(monkeypatch, stepping)
    prepared = stepping.prepare(MLP, "fp32", "eager")
    assert cuda.calls == ["empty", *["step"] * TINY_STEPS, "reset", "step", "step"]
    assert prepared.peak_bytes == len(cuda.calls)
    assert stepping.block() == pytest.approx(3e-3 / TINY_STEPS)
    assert cuda.calls[-TINY_STEPS - 2 :] == ["step"] * (TINY_STEPS + 2)
    cuda.reserved = 101  # more than a third
    stepping.block()
    assert cuda.calls[-2:] == ["step", "empty"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="on Linux alone")
def test_a_test_keeps_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PROCESSORS", 1)
    before = os.sched_getaffinity(0)
    Stepping("cpu", tiny=True).prepare(MLP, FUSED_BASELINE, "eager")
    assert os.sched_getaffinity(0) == before


def test_the_memory_of_a_graph_is_handed_out_at_its_capture(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping = Stepping("cpu", tiny=True)
    memory = FakeMemory(monkeypatch, stepping)
    stepping.prepare(MLP, FUSED_BASELINE, "graphed")
    # two warm up, one is captured; replays call nothing
    assert memory.calls[-4:] == ["reset", "step", "step", "step"]


def waits(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(batch["inputs"]).square().mean()
    return loss * min(1.0, loss.item())


def test_a_step_that_cannot_be_captured_says_why(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, MLP, Maker(lambda tiny: made_up(tiny)._replace(loss=waits)))
    with pytest.raises(RuntimeError, match="^cannot be captured: RuntimeError: operation not perm"):
        Stepping("cpu", tiny=True).prepare(MLP, FUSED_BASELINE, "graphed")


def test_what_is_known_to_be_impossible_is_a_row_that_says_why() -> None:
    comparison = Comparison(lambda: pytest.fail("it must start nothing"), rounds=1)
    row = comparison.row(Key("graphed", MLP, BASELINE))
    assert str(row.error).startswith("cannot be captured: GradScaler.step() waits")


# --- targets ---


def row_of(key: Key = O2, speed: float = 1.25, memory: float = 0.84, **options: Any) -> Row:
    own = Measured(1000.0 * speed, int(memory * 2**30), 150, 2.0)
    baseline = Measured(1000.0, 2**30, 300, 2.5)
    spread = Spread(speed, speed - 0.01, speed + 0.01, speed - 0.02, speed + 0.02)
    fields = {"own": own, "baseline": baseline, "speed": spread, "optimizer": "AdamW()"}
    return Row(key, "2000-01-01", **{**fields, "steps": 40, **options})


def failed_row(key: Key = O2) -> Row:
    return Row(key, "2000-01-01", error="RuntimeError: no kernel")


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (row_of(speed=1.24, memory=0.85), []),
        (row_of(speed=1.239), ["speed 1.239, must be at least 1.24: MISSED"]),
        (row_of(memory=0.851), ["memory 0.851, must be at most 0.85: MISSED"]),
        (row_of(own=Measured(1.0, None, None, 2.0)), ["memory must be at most 0.85: not measured"]),
        (
            failed_row(),
            [
                "speed must be at least 1.24: RuntimeError: no kernel",
                "memory must be at most 0.85: RuntimeError: no kernel",
            ],
        ),
        (row_of(O2._replace(mode="compiled"), speed=0.1), []),
    ],
)
def test_what_must_be_reached_and_was_not_is_named(row: Row, missed: list[str]) -> None:
    found = step_report.missed({row.key: row})
    assert found == [f"eager, {BERT}, O2: {line}" for line in missed]


def test_aims_are_told_beside_what_must_be_reached() -> None:
    lines = step_report.target_lines({O2: row_of()})
    assert lines[:3] == [
        f"eager, {BERT}, O2: speed 1.250, must be at least 1.24: reached",
        f"eager, {BERT}, O2: memory 0.840, must be at most 0.85: reached",
        f"eager, {BERT}, O2: speed 1.250, is to be at least 1.3: MISSED",
    ]
    assert lines[-1] == f"eager, {MLP}, O2: speed is to be at least 1.5: not measured"


@pytest.mark.parametrize(("speed", "code"), [(1.24, 0), (1.23, 1)])
def test_a_target_that_is_missed_is_printed_written_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    speed: float,
    code: int,
) -> None:
    monkeypatch.setattr(step, "Comparison", lambda start, rounds: FixedRows(speed))
    monkeypatch.setattr(step_models.importlib.util, "find_spec", lambda name: "found")
    few = ("--device", "cpu", "--modes", "eager", "--candidates", "O2", "--only", "128 x 128")
    assert step.main([*few, "--out", str(tmp_path)]) == code
    text = (tmp_path / "step-CPU.json").read_text()
    assert (f"speed {speed:.3f}, must be at least 1.24: MISSED" in text) is bool(code)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"1 rows measured, 0 could not be, 269 not tried; {code} targets missed"


class FixedRows:
    """Stands in for `Comparison`."""

    def __init__(self, speed: float) -> None:
        self.row = partial(row_of, speed=speed)

    def end(self) -> None:
        pass


# --- what is written, shown and drawn ---


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    about = {"device": "A GPU", "torch": "2.0", "date": "2000-01-01", "tiny": False}
    rows = [row_of(), row_of(Key("graphed", MLP, "O5")), failed_row(Key("eager", MLP, "O3"))]
    lost = row_of(Key("eager", MLP, "O1"), own=Measured(1.0, 5, 6, math.nan))
    results = Results(tmp_path / step_results.file_name(about), about)
    results.missing = {Key("compiled", MLP, "O1"): "no time"}
    for row in [*rows, lost]:
        results.add(row)
    read = Results.read(tmp_path / "step-A-GPU.json")
    assert list(read.rows.values())[:3] == rows
    assert math.isnan(read.rows[lost.key].own.final_loss)
    assert (read.missing, read.targets) == (results.missing, results.targets)
    assert read.as_text() == results.as_text()
    assert "not finite" in read.as_text()
    assert {path.name for path in tmp_path.iterdir()} == {"step-A-GPU.json", "step-A-GPU.md"}


def test_the_table_compares_with_the_baseline_and_with_that_of_the_mode() -> None:
    graphed = [
        Row(Key("graphed", MLP, BASELINE), "2000-01-01", error="cannot be captured: it waits"),
        row_of(Key("graphed", MLP, FUSED_BASELINE), speed=2.0),
        row_of(Key("graphed", MLP, "O2 fused_step"), speed=3.0, memory=0.5),
    ]
    text = step_report.as_text({}, {row.key: row for row in graphed}, {}, [])
    cells = [re.split(r" *\| *", line) for line in text.splitlines() if "O2 fused" in line]
    assert cells[0][1:-1] == [
        *("graphed", "O2 fused_step", "3000.0", "3.00 (2.99-3.01)", "1.50", "512", "0.500"),
        *("150", "0.50", "2.0000", "0.8000", "AdamW()"),
    ]
    assert f"- graphed, {MLP}, {BASELINE}: cannot be captured: it waits" in text


def test_a_plot_is_drawn_of_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib").use("agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    about = {"device": "A GPU", "torch": "2.0", "date": "2000-01-01", "tiny": False}
    results = Results(tmp_path / "rows.json", about)
    keys = [key for key in step.schedule() if key.model in (BERT, MLP)]
    for number, key in enumerate(keys):
        results.rows[key] = row_of(key, speed=2 + number / 100)
    results.write()
    plot = tmp_path / "plot.png"
    arguments = ["--from", str(results.path), "--plot", str(plot)]
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert step.main(arguments) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    titles = [axes.get_title() for axes in figures[0].axes]
    assert titles == [f"{model}: {what}" for model in (BERT, MLP) for what in ("speed", "memory")]
    drawn = [len(line.get_xdata()) for line in figures[0].axes[0].get_lines()]
    assert drawn[:3] == [len(CANDIDATES)] * 3
    assert "90 rows measured" in capsys.readouterr().out
    monkeypatch.undo()
    pyplot.close(figures[0])


def test_the_page_names_the_targets_and_the_steps() -> None:
    heading = "## Whole training steps on a GPU\n"
    section = text_of(DOCS / "benchmarks.md").partition(heading)[2].partition("\n## ")[0]
    assert all(f"{target.bound:g} x" in section for target in step_report.TARGETS)
    assert f"the loss after {STEPS} steps" in section


def test_nothing_can_be_drawn_of_no_rows() -> None:
    with pytest.raises(ValueError, match="^there must be rows to draw; got none"):
        step_plot.draw(Results(None, {}), Path("plot.png"))


def test_the_order_has_every_row_once_and_what_tells_most_first() -> None:
    keys = list(step.schedule())
    assert len(keys) == len(set(keys)) == 3 * len(MODELS) * len(CANDIDATES)
    assert keys[:3] == [O2._replace(candidate=name) for name in (BASELINE, "O2", "O2 fused_step")]


def test_a_machine_without_cupy_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    about = kernel_report.machine(torch.device("cuda"))
    assert (about["device"], about["cupy"]) == ("A GPU", "missing")
