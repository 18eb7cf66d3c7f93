"""The benchmark of the kernels runs, as far as a CPU goes, and knows the models' sizes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import cuda_on_cpu
import pytest
import torch
from benchmarks import kernels
from benchmarks.kernels import Measured
from benchmarks.model_shapes import MODELS
from cuda_on_cpu.fake_gpu import Gpu

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


def test_a_quick_run_prints_every_operation_on_every_model() -> None:
    # torch 2.6 leaves a temporary folder to its finalizer
    warnings = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")
    command = [sys.executable, *warnings, str(SCRIPT), "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.stderr, done.returncode) == ("", 0)
    for name in (*MODELS, kernels.LARGE):
        assert done.stdout.count(f"{name}: ") == 1
    names = [one.name for one in kernels.operations([(2,)], torch.device("cpu"))]
    assert len(names) == 19
    assert all(done.stdout.count(f"  {name}  ") == len(MODELS) + 1 for name in names)


def test_what_is_slower_than_it_must_be_is_named() -> None:
    rows = [Measured("unscale fp16 to fp32", 1, 1, share, 2) for share in (0.849, 0.85)]
    rows.append(Measured("clip by norm", 1, 1, 0.1, 2))
    assert kernels.missed(rows) == ["unscale fp16 to fp32: 85% of the copy, must be 85%"]


def test_on_a_gpu_what_is_timed_are_the_kernels(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    cuda_on_cpu.require_compiler()
    modules = Gpu(monkeypatch, pytestconfig).modules
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
        *("unscale", "summarize", "update", "reconcile", "adamw", "adamw"),
    ]
    amp.deactivate()  # as long as there are kernels


def test_on_a_gpu_kernels_that_do_not_work_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--quick"])
    monkeypatch.setattr(kernels, "measure", lambda *_, **__: forced.append(os.environ[VARIABLE]))
    monkeypatch.setattr(kernels, "show", lambda *_: None)
    monkeypatch.setattr(kernels, "machine", lambda device: {"device": str(device)})
    forced: list[str] = []
    kernels.main()
    assert set(forced) == {"cupy"}


def test_phases_that_are_not_beaten_by_far_enough_are_named() -> None:
    times = {kernels.PHASE: 1.0, kernels.FUSED_PHASE: 1.79, kernels.FOREACH_PHASE: 3.0}
    rows = [Measured(name, 1, taken, 1.0, 2) for name, taken in times.items()]
    assert kernels.too_slow(rows) == [
        "phase: ours, one-pass AdamW: 1.79 times as fast as phase: AdamW(fused=True), must be 1.8"
    ]


def test_results_say_on_what_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "RESULTS", tmp_path)
    about = kernels.machine(torch.device("cpu")) | {"device": "A GPU"}
    path = kernels.save(about, {"a model": [Measured("copy", 8, 2, 1.0, 1)]})
    assert path == tmp_path / "A-GPU.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["machine"]["torch"] == torch.__version__
    assert saved["lists"]["a model"][0]["milliseconds"] == 2
