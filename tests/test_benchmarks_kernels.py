"""The benchmark of the kernels runs, as far as a CPU goes, and knows the models' sizes."""

import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu_timing, kernel_report, kernels
from benchmarks.kernel_report import Measured
from benchmarks.model_shapes import MODELS
from cuda_on_cpu.fake_gpu import Gpu
from cuda_on_cpu.fake_graphs import FakeCuda

from amp_patch.kernels import cuda_cross_entropy
from amp_patch.session import session
from amp_patch.step import loss_scaling

VARIABLE = "AMP_PATCH_KERNELS"
SCRIPT = Path(__file__).parent / "benchmarks" / "kernels.py"


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("ResNet-50", 161, 25_557_032), ("BERT-large", 391, 335_141_888), ("GPT-2", 148, 124_439_808)],
)
def test_models_have_their_sizes(model: str, tensors: int, parameters: int) -> None:
    shapes = MODELS[model]()
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, parameters)


@pytest.mark.slow(instead="its parts, with times that are made up")
def test_a_quick_run_prints_every_operation_on_every_model() -> None:
    # torch 2.6 leaves a temporary folder to its finalizer
    warnings = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")
    command = [sys.executable, *warnings, str(SCRIPT), "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.stderr, done.returncode) == ("", 0)
    for name in (*MODELS, kernels.LARGE, kernels.LOGITS):
        assert done.stdout.count(f"{name}: ") == 1
    names = [one.name for one in kernels.operations([(2,)], torch.device("cpu"))]
    assert len(names) == 19
    assert all(done.stdout.count(f"  {name}  ") == len(MODELS) + 1 for name in names)
    losses = [one.name for one in kernels.losses([(2, 2)], torch.device("cpu"))]
    assert [done.stdout.count(f"  {name}  ") for name in losses] == [1, 1, 1, 1]


def measured(operation: str, milliseconds: float = 1.0, share: float = 1.0) -> Measured:
    return Measured(operation, 8.0, milliseconds, 0.5, share, 2)


def test_a_table_has_its_numbers_below_each_other() -> None:
    rows = [measured("copy"), measured("unscale fp16", 12.5, 0.849)]
    assert kernel_report.as_table(rows).splitlines() == [
        "  operation      MB      ms  host ms  GB/s  of the copy  launches",
        "  copy          8.0   1.000    0.500     8         100%         2",
        "  unscale fp16  8.0  12.500    0.500     1          85%         2",
    ]


def test_what_is_slower_than_it_must_be_is_named() -> None:
    rows = [measured("unscale fp16 to fp32", share=share) for share in (0.849, 0.85)]
    rows.append(measured("clip by norm", share=0.1))
    assert kernel_report.below_share(rows, kernels.AT_LEAST) == [
        "unscale fp16 to fp32: 85% of the copy, must be 85%"
    ]


def test_on_a_gpu_what_is_timed_are_the_kernels(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = gpu.modules
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    rows = {one.name: one.make for one in kernels.operations([(3, 5), (7,)], torch.device("cpu"))}
    own = {"adamw": "adamw", "sgd with momentum": "sgd", "lamb": "lamb"}
    for name, source in own.items():
        run = rows[name]()
        modules.launched.clear()
        run()
        assert {one.partition("_")[0] for one in modules.launched} == {source}
    run = rows[kernels.PHASE]()
    modules.launched.clear()
    run()
    assert [one.partition("_")[0] for one in modules.launched] == [
        *("unscale", "summarize", "update", "clip", "adamw", "adamw"),
    ]


def test_on_a_gpu_the_loss_is_the_kernels(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cross_entropy, "MIN_LOGITS", 0)
    monkeypatch.setattr(cuda_cross_entropy, "MIN_CLASSES", 0)
    for operation in kernels.losses([(2, 3)], torch.device("cpu")):
        gpu.modules.launched.clear()
        operation.make()()
        is_ours = not operation.name.startswith("torch's")
        assert len(gpu.modules.launched) == 2 * is_ours


def test_on_a_gpu_the_phase_is_replayed_too(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, gpu.modules)
    run = kernels.replayed_phase([(3, 5), (7,)], torch.device("cpu"))
    gc.collect()  # what the graph needs must be held
    steps = [entry["step"] for one in session.optimizers.steps for entry in one.state.values()]
    before = [step.item() for step in steps]
    gpu.modules.launched.clear()
    run()
    assert gpu.modules.launched.count("adamw_float16_to_float16") == 1
    assert len(steps) == 2
    assert [step.item() for step in steps] == [count + 1 for count in before]


def test_only_a_gpu_replays() -> None:
    for device, count in (("cuda", 1), ("cpu", 0)):
        names = [one.name for one in kernels.operations([(2,)], torch.device(device))]
        assert names.count(kernels.REPLAYED_PHASE) == count


class Clock:
    """A GPU whose device sleeps as told, and whose host takes 40 ms for each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.slept = 0.0, []
        event = type("Event", (), {"record": print, "synchronize": print})
        event.elapsed_time = lambda self, other: 3.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event())
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: self.host)

    def call(self, milliseconds: float) -> None:
        self.host += milliseconds / 1e3


@pytest.mark.parametrize(("host", "cycles"), [(1.0, 60_000_000), (40.0, 160_000_000)])
def test_the_device_sleeps_for_longer_than_the_host_needs(
    monkeypatch: pytest.MonkeyPatch, host: float, cycles: int
) -> None:
    clock = Clock(monkeypatch)
    times = gpu_timing.time_calls(lambda: clock.call(host), torch.device("cuda"), repeats=3)
    assert times.device == 3.0
    assert times.host == pytest.approx(host)
    assert clock.slept == pytest.approx([cycles] * 3)


class Main:
    """Runs the script as on a GPU that needs 1 ms for each operation.

    Attributes:
        folder: what it writes to.
        times: of operations that need longer.
        lists: how many lists of tensors can be measured before the memory is full.
        forced: the kernels that were forced, once per list.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self.folder = monkeypatch, folder
        self.times = {kernels.FUSED_PHASE: 1.8, kernels.FOREACH_PHASE: 3.0}
        self.lists = 5
        self.forced: list[str] = []
        monkeypatch.setenv(VARIABLE, "torch")
        monkeypatch.setattr(kernels, "machine", lambda device: {"device": f"A {device.type}"})
        monkeypatch.setattr(kernels, "measure", self._measure)

    def _measure(
        self, shapes: object, device: torch.device, repeats: int, listed: kernels.Lister
    ) -> list[Measured]:
        if len(self.forced) == self.lists:
            raise torch.OutOfMemoryError
        self.forced.append(os.environ[VARIABLE])
        names = [one.name for one in listed([(2, 2)], device)]
        return [measured(name, self.times.get(name, 1.0)) for name in names]

    def run(self, *arguments: str) -> int:
        command = ["kernels.py", "--out", str(self.folder), *arguments]
        self._monkeypatch.setattr(sys, "argv", command)
        return kernels.main()

    def saved(self) -> dict[str, Any]:
        return json.loads((self.folder / "A-cuda.json").read_text(encoding="utf-8"))


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    return Main(monkeypatch, tmp_path / "results")


def test_on_a_gpu_kernels_that_do_not_work_are_an_error(main: Main) -> None:
    assert main.run("--quick") == 0
    assert main.forced == ["cupy"] * 5
    assert not main.folder.exists()


def test_where_every_target_is_reached_the_exit_code_is_0(main: Main) -> None:
    assert main.run() == 0
    assert main.saved()["missed"] == []
    models = ["BERT-large", "ResNet-50", "GPT-2"]
    assert list(main.saved()["lists"]) == [kernels.LARGE, *models, kernels.LOGITS]


def test_a_target_that_is_missed_is_printed_written_and_the_exit_code(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    main.times[kernels.FUSED_PHASE] = 1.79
    assert main.run() == 1
    line = (
        "phase: ours, one-pass AdamW: 1.79 times as fast as phase: AdamW(fused=True), must be 1.8"
    )
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main.saved()["missed"] == [line]


def test_what_was_measured_is_kept_where_the_rest_cannot_be(main: Main) -> None:
    main.lists = 2
    with pytest.raises(torch.OutOfMemoryError):
        main.run()
    assert list(main.saved()["lists"]) == [kernels.LARGE, "BERT-large"]


def test_phases_that_are_not_beaten_by_far_enough_are_named() -> None:
    times = {kernels.PHASE: 1.0, kernels.FUSED_PHASE: 1.79, kernels.FOREACH_PHASE: 3.0}
    rows = [measured(name, taken) for name, taken in times.items()]
    assert kernel_report.not_faster(rows, kernels.PHASE, kernels.RIVALS) == [
        "phase: ours, one-pass AdamW: 1.79 times as fast as phase: AdamW(fused=True), must be 1.8"
    ]


def test_results_say_on_what_they_were_measured(tmp_path: Path) -> None:
    about = kernel_report.machine(torch.device("cpu")) | {"device": "A GPU"}
    path = kernel_report.save(tmp_path / "new", about, {"a model": [measured("copy", 2.0)]}, [])
    assert path == tmp_path / "new" / "A-GPU.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["lists"]["a model"][0]["milliseconds"] == 2
