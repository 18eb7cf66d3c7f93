"""The benchmarks run, compare as they say, and write what they measured."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import processes
import pytest
import torch
from benchmarks import (
    architectures,
    cuda_host,
    host_in_turn,
    host_rows,
    host_steps,
    memory,
    middle_models,
    norms,
    report,
)
from benchmarks.host_models import HostModel, regression
from benchmarks.host_steps import rules_of_cpu_autocast
from benchmarks.report import Row
from benchmarks.rounds import Spread, interleave, median_time, ratio
from distributed.ranks import IMPORTED
from support import nightly_but
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "tests" / "benchmarks" / "run.py"
HOST_ROWS = ROOT / "tests" / "benchmarks" / "host_rows.py"
# torch 2.6 leaves a temporary folder to its finalizer
WARNINGS = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, *WARNINGS, RUN, *args], env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        (["host", "startup"], ["step, O2 against that ", "initialize, O5 against that "]),
        pytest.param(["casts"], ["casts, O1 "], marks=pytest.mark.slow),
    ],
)
def test_a_quick_run_prints_a_line_for_each_thing_measured(
    parts: list[str], lines: list[str]
) -> None:
    done = run("--quick", "--only", *parts)
    assert done.stderr == ""
    assert done.returncode == 0
    for line in lines:
        assert line in done.stdout


@pytest.mark.slow(instead="the other benchmarks")
def test_host_rows_compare_each_level_with_what_it_must_beat(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    few = ("--rounds", "1", "--steps", "2", "--only", "penalty", "--cpu-time", "--quiet")
    few = (*few, "--optimizer", "SGD(foreach=True)", "--micro-batches", "2")
    plot = tmp_path / "host.png"
    done = processes.run(
        [sys.executable, *WARNINGS, HOST_ROWS, *few, "--out", out, "--plot", plot], env=ENVIRONMENT
    )
    assert (done.returncode, done.stderr) == (0, "")
    saved = json.loads(out.read_text())
    assert saved["optimizer"] == "SGD(foreach=True)"
    (ratios,) = saved["ratios"].values()
    assert {name.partition(" / ")[0] for name in ratios} >= {"bare bf16", "O1", "O2", "O4", "O5"}
    assert all(0 < spread["least"] <= spread["median"] for spread in ratios.values())
    (least,) = saved["least seconds"].values()
    (against,) = saved["against autocast"].values()
    assert against["O5 / autocast bf16"]["median"] == least["O5"] / least["autocast bf16"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def assert_by_hand_as_in_float32(made: HostModel) -> None:
    """Check that a model in half has the loss of float32, and gradients of the same weights."""
    model, loss, bare_loss = made
    torch.manual_seed(0)
    exact = loss(model.eval())  # without dropout
    exact.backward()
    trained = [param.grad is not None for param in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    half = bare_loss(model.bfloat16())
    half.backward()
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(exact.item(), rel=0.02)
    assert [param.grad is not None for param in model.parameters()] == trained
    assert [param.requires_grad for param in model.parameters()] == trained


@pytest.mark.slow(instead="the other benchmarks")
@pytest.mark.parametrize("name", architectures.MODELS)
def test_an_architecture_by_hand_has_the_loss_and_the_gradients_of_float32(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    # transformers leaves a method of its own at torch's class
    monkeypatch.setattr(nn.Module, "smart_apply", None, raising=False)
    monkeypatch.delattr(nn.Module, "smart_apply")
    torch.manual_seed(0)
    assert_by_hand_as_in_float32(architectures.MODELS[name]())


@pytest.mark.parametrize("name", middle_models.MODELS)
def test_a_model_of_middle_size_by_hand_has_the_loss_of_float32(name: str) -> None:
    torch.manual_seed(0)
    made = middle_models.MODELS[name]()
    assert 280_000 <= sum(map(torch.numel, made.model.parameters())) <= 2_000_000
    assert_by_hand_as_in_float32(made)


def test_a_plot_needs_what_it_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_rows.py", "--plot", "host.png"])
    with pytest.raises(SystemExit):
        host_rows.main()
    assert "--plot draws what --out or --from names; give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("layer_norm", lambda x: nn.functional.layer_norm(x, (4,))),
        ("softmax", lambda x: x.softmax(0)),
        ("exp", torch.exp),
        ("mse_loss", lambda x: nn.functional.mse_loss(x, x)),
        ("cross_entropy", lambda x: nn.functional.cross_entropy(x, torch.tensor(1))),
        ("matmul", lambda x: x.float() @ x.float()),
    ],
)
def test_by_the_cpus_list_functions_run_in_the_dtype_of_autocast_there(
    amp: ModuleType, name: str, call: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    half = torch.ones(4, dtype=torch.bfloat16)
    with torch.autocast("cpu"):
        expected = call(half).dtype

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self) -> torch.Tensor:
            return call(half)

    model = amp.initialize(Model(), opt_level="O4", rules=rules_of_cpu_autocast(), verbosity=0)
    assert model().dtype is expected


@pytest.mark.parametrize("start", nightly_but(["forkserver"], ["forkserver", "spawn"]))
def test_two_processes_take_turns_and_end(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    blocks: list[Connection] = []
    timed = host_in_turn._block

    def block(process: Connection) -> float:
        blocks.append(process)
        return timed(process)

    context = multiprocessing.get_context(start)
    context.set_forkserver_preload(list(IMPORTED))  # the server is that of the ranks
    monkeypatch.setattr(host_in_turn, "PROCESSES", context)
    monkeypatch.setattr(host_in_turn, "_block", block)
    penalty = "gradient penalty, 9 linears"
    found = host_in_turn.compare(penalty, "O2", "bare fp16", blocks=3, pairs=1)
    assert found.least > 0
    ours, theirs = blocks[:2]
    assert ours is not theirs
    assert blocks == [ours, theirs] * 3
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("autocast fp16", 16), ("O1", 16), ("O2", 20), ("O5", 20), ("O5 fused_step", 16)],
)
def test_the_peak_of_a_step_is_that_of_the_bytes_for_each_parameter(
    amp: ModuleType, name: str, expected: int
) -> None:
    def peak(width: int) -> int:
        def make() -> HostModel:
            model = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)])
            return regression(model, torch.randn(1, width), torch.randn(1, width))

        return memory.peak(name, make)

    found = (peak(640) - peak(512)) / (12 * (640**2 - 512**2))
    assert found == pytest.approx(expected, rel=0.05)


def test_autocast_by_cudas_list_runs_norms_in_float32_in_its_block_only() -> None:
    def dtypes(enabled: bool) -> list[torch.dtype]:
        half = torch.ones(2, 4, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results = [F.group_norm(half, 2), half.softmax(0), half.softmax(0, torch.float64)]
            return [one.dtype for one in (*results, F.linear(half, half))]

    half, kept = torch.bfloat16, torch.float64
    before = F.group_norm
    assert dtypes(True) == [half, half, kept, half]
    with host_steps.list_of_cuda():
        assert dtypes(True) == [torch.float32, torch.float32, kept, half]
        assert dtypes(False) == [half, half, kept, half]
    assert F.group_norm is before


def test_casts_by_cudas_list_take_no_more_memory_than_autocasts(amp: ModuleType) -> None:
    for make in (memory.group_norms, memory.attention):
        found = {name: memory.peak(name, make) for name in ("O1", "autocast fp16 by CUDA's list")}
        assert found["O1"] <= 1.001 * found["autocast fp16 by CUDA's list"]


@pytest.mark.parametrize("name", nightly_but([*norms.FUNCTIONS][:2], norms.FUNCTIONS))
def test_fast_norms_are_as_near_to_float64_as_the_level_without_them(
    amp: ModuleType, name: str
) -> None:
    errors, u = norms.errors_of(name, "O1"), torch.finfo(torch.float16).eps / 2
    for without, with_them, on_cuda in zip(*errors.values(), strict=True):
        assert with_them <= (without if name != "softmax" else 1.1 * u)
        assert on_cuda <= 1.1 * u


@pytest.mark.parametrize("what", norms.LEFT_OUT)
def test_what_fast_norms_do_in_the_place_of_what_they_leave_out_rounds_once(
    amp: ModuleType, what: str
) -> None:
    left_out, kept = norms.LEFT_OUT[what]("O1")
    assert kept <= torch.finfo(torch.float16).eps / 2
    assert left_out > kept


def test_a_training_with_fast_norms_and_its_memory_are_measured(amp: ModuleType) -> None:
    losses = [norms.final_loss(norms.NormBehind, "O4", given, 0, 2) for given in ("", "fast-norms")]
    assert 0 < abs(losses[0] - losses[1]) < 1e-2
    assert norms.kept_for_backward("fast-norms") < norms.kept_for_backward(None)


def test_the_phase_on_cuda_is_timed_in_its_parts_while_kernels_are_only_launched(
    amp: ModuleType,
) -> None:
    shapes = [cuda_host.cut_down(shape) for shape in [(3,), (300, 200)]]
    assert shapes == [(3,), (1, 4097)]
    found = cuda_host.measure(shapes, moves=True, steps=2)
    assert all(found[name] > 0 for name in (*cuda_host.PARTS, "phase"))
    # check, summarize, move the scale, clip, prepare, step
    assert found["launches"] == 6
    assert "BERT" in cuda_host.as_table({"BERT": found})


@pytest.mark.parametrize("partly", [["--quick"], ["--only", "casts"]])
def test_only_a_whole_measurement_is_written(partly: list[str]) -> None:
    done = run("--write-docs", *partly)
    assert done.returncode == 2
    assert "--write-docs needs the whole measurement; leave out --quick" in done.stderr


def test_candidates_take_turns_in_an_order_that_rotates() -> None:
    order: list[str] = []

    def candidate(name: str) -> float:
        order.append(name)
        return 1.0

    rounds: list[int] = []
    seconds = interleave(
        {name: lambda name=name: candidate(name) for name in "abc"},
        rounds=3,
        on_round=lambda: rounds.append(len(order)),
    )
    assert "".join(order) == "abc" + "bca" + "cab"
    assert rounds == [3, 6, 9]
    assert seconds == {name: [1.0] * 3 for name in "abc"}


def test_a_ratio_is_taken_within_each_round() -> None:
    seconds = {"ours": [1.0, 20.0, 3.0], "theirs": [2.0, 10.0, 4.0]}
    assert ratio(seconds, "ours", "theirs") == Spread(0.75, 0.625, 1.375, 0.5, 2.0)


def test_a_spread_of_one_value_is_that_value() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)


def test_warm_up_steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    steps = iter([100.0, 100.0, 1.0, 2.0, 6.0])

    def step() -> None:
        nonlocal clock
        clock += next(steps)

    monkeypatch.setattr("benchmarks.rounds.time.perf_counter", lambda: clock)
    assert median_time(step, warm_up=2, steps=3) == 2.0


@pytest.mark.parametrize(("measured", "reached"), [(649, "yes"), (650, "yes"), (651, "NO")])
def test_a_row_says_whether_its_bound_is_kept(measured: int, reached: str) -> None:
    cells = Row("casts", measured, at_most=650).cells()
    assert cells == ("casts", str(measured), "exact", "<= 650", reached)


def test_results_describe_the_machine_by_its_kind_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results" / "cpu.json")
    report.save([Row("step", Spread(0.5, 0.4, 0.6, 0.3, 0.7), "x", at_most=1.0)])
    saved = json.loads(report.RESULTS.read_text())
    assert set(saved["machine"]) == {
        "processor",
        "cores",
        "system",
        "python",
        "torch",
        "threads",
        "date",
    }
    (row,) = saved["rows"]
    assert row["reached"] is True
    assert row["value"] == {"median": 0.5, "lower": 0.4, "upper": 0.6, "least": 0.3, "most": 0.7}


def test_the_table_replaces_what_stands_between_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.write_page([Row("casts, O1", 630, at_most=650)])
    text = page.read_text()
    assert text.startswith("before\n<!-- benchmarks:begin -->\nMeasured on ")
    assert text.endswith("| casts, O1 | 630 | exact |\n<!-- benchmarks:end -->\nafter\n")
    assert "old" not in text


def test_a_page_without_marks_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("nothing here\n")
    monkeypatch.setattr(report, "PAGE", page)
    with pytest.raises(
        SystemExit, match=r"benchmarks\.md must hold the lines <!-- benchmarks:begin"
    ):
        report.write_page([])
