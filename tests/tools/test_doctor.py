"""``amp-patch doctor``: what it says of machines that are made up, and of this one."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cupy
import pytest
import torch
from click.testing import CliRunner

from amp_patch import levels, requested_level
from amp_patch.kernels import cuda_compiler
from amp_patch.kernels.cuda_module import Failure
from amp_patch.tools import command_line
from amp_patch.tools.doctor import compilation, installation, self_test, speed
from amp_patch.tools.doctor import machine as machines
from amp_patch.tools.doctor.advice import Advice, advise
from amp_patch.tools.doctor.finding import Finding
from amp_patch.tools.doctor.machine import Gpu, Machine
from amp_patch.tools.doctor.report import Report
from amp_patch.tools.doctor.self_test import Outcome
from amp_patch.tools.doctor.speed import Speed

H100 = Gpu("NVIDIA H100", (9, 0), 80 * 2**30)
TOOLCHAIN = ((13, 0), Path("include"))
CUPY = {"cupy-cuda13x": "14.2.0"}
#: A machine of which nothing bad can be said.
GOOD = Machine(
    torch="2.13.0+cu130",
    cuda="13.0",
    gpus=(H100,),
    has_driver=True,
    packages={**CUPY, **dict.fromkeys(machines.OPTIONAL, "1.0")},
    toolchain=TOOLCHAIN,
)
CPU = replace(GOOD, torch="2.13.0+cpu", cuda=None, gpus=(), has_driver=False, toolchain=None)


def said(machine: Machine) -> list[tuple[str, str, str]]:
    """Return what is not well."""
    found = installation.judge(machine)
    return [
        (one.topic, one.state, f"{one.text} -> {one.mend}") for one in found if one.state != "ok"
    ]


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert said(GOOD) == []
    text = [one.text for one in installation.judge(GOOD)]
    assert "NVIDIA H100, 80 GiB, capability 9.0" in text
    assert "cupy-cuda13x 14.2.0, NVRTC 13.0, CUDA's headers" in text


@pytest.mark.parametrize(
    ("machine", "topic", "state", "pattern"),
    [
        (replace(CPU, packages={}), "GPU", "note", "no GPU was found"),
        (
            replace(CPU, has_driver=True),
            "GPU",
            "broken",
            "NVIDIA driver, but torch is built for the CPU.*-> pip install --force-reinstall torch",
        ),
        (replace(GOOD, gpus=()), "GPU", "broken", "torch sees no GPU.*-> nvidia-smi"),
        (
            replace(GOOD, gpus=(), environ={"CUDA_VISIBLE_DEVICES": ""}),
            "GPU",
            "note",
            "CUDA_VISIBLE_DEVICES hides every GPU.*-> unset CUDA_VISIBLE_DEVICES",
        ),
        (replace(GOOD, gpus=(Gpu("GTX", (6, 1), 2**33),)), "GPU", "note", "no tensor cores"),
        (
            replace(GOOD, packages={"cupy-cuda12x": "14"}, toolchain=((12, 9), Path("x"))),
            "cupy",
            "broken",
            r"cupy-cuda12x is installed, and torch is built for CUDA 13\.0 -> "
            r"pip uninstall -y cupy-cuda12x && pip install 'amp_patch\[cuda13\]'",
        ),
        (
            replace(GOOD, packages={}, toolchain=None),
            "cupy",
            "note",
            r"cupy is not installed.*-> pip install 'amp_patch\[cuda13\]'",
        ),
        (
            replace(GOOD, toolchain=None, toolchain_error="ImportError: libnvrtc.so.13"),
            "cupy",
            "broken",
            r"cannot compile here: ImportError: libnvrtc\.so\.13 -> pip install 'amp_patch\[cuda13",
        ),
        (
            replace(GOOD, environ={"AMP_PATCH_KERNELS": "torch"}),
            "environment",
            "note",
            "AMP_PATCH_KERNELS=torch: .* -> unset AMP_PATCH_KERNELS",
        ),
        (replace(CPU, environ={"AMP_PATCH_KERNELS": "cupy"}), "environment", "broken", "an error"),
        (replace(GOOD, environ={"AMP_PATCH_KERNELS": "no"}), "environment", "broken", "'no'"),
        (
            replace(GOOD, environ={"AMP_PATCH_OPT_LEVEL": "O2"}),
            "environment",
            "note",
            "AMP_PATCH_OPT_LEVEL=O2: every script .* -> unset AMP_PATCH_OPT_LEVEL",
        ),
        (replace(GOOD, environ={"AMP_PATCH_OPT_LEVEL": "02"}), "environment", "broken", "'02'"),
        (
            replace(GOOD, apex="/site/apex/__init__.py", apex_has_amp=True),
            "apex",
            "note",
            "real apex with apex.amp lies in /site/apex.*-> amp-patch run --force",
        ),
        (
            replace(GOOD, apex="/site/apex/__init__.py", apex_is_nvidias=False),
            "apex",
            "note",
            "/site/apex/__init__.py is not NVIDIA's apex, .*-> pip uninstall apex",
        ),
        (
            replace(GOOD, enabled=Path("/site"), is_enabled_whole=False),
            "enable",
            "note",
            "is on, in /site, by another amp_patch or not in full -> amp-patch enable",
        ),
        (replace(GOOD, cudnn=False), "cudnn", "note", "cuDNN is switched off or missing"),
        (replace(GOOD, torch="2.5.1"), "torch", "broken", "2.6 or later -> pip install --upgrade"),
    ],
)
def test_what_is_wrong_is_found_with_its_mend(
    machine: Machine, topic: str, state: str, pattern: str
) -> None:
    found = [one for one in said(machine) if one[0] == topic]
    assert [one[1] for one in found] == [state]
    assert re.search(pattern, found[0][2])


@pytest.mark.parametrize("machine", [CPU, replace(CPU, packages={}), replace(CPU, packages=CUPY)])
def test_a_machine_without_a_gpu_is_well(machine: Machine) -> None:
    assert all(state != "broken" for _, state, _ in said(machine))


@pytest.mark.parametrize(
    ("folder", "words"), [(None, "enable is off"), (Path("/site"), "enable is on, in /site: every")]
)
def test_whether_the_environment_is_enabled_is_told(folder: Path | None, words: str) -> None:
    findings = installation.judge(replace(GOOD, enabled=folder))
    assert [words in one.text for one in findings if one.topic == "enable"] == [True]


def test_an_apex_without_amp_is_no_trouble() -> None:
    assert said(replace(GOOD, apex="/site/apex/__init__.py")) == []


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_KERNELS", "torch")
    here = machines.look()
    assert here.torch == torch.__version__
    assert len(here.gpus) == torch.cuda.device_count()
    assert here.environ["AMP_PATCH_KERNELS"] == "torch"
    assert (here.toolchain is None) == bool(here.toolchain_error)
    assert "rich" in here.packages


def test_a_cupy_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    here = machines.look()
    assert here.toolchain is None
    assert "cupy" in here.toolchain_error


# --- kernels ---


@pytest.fixture
def one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "sources", lambda: ["update_scale.cu"])


@pytest.mark.skipif(sys.platform != "linux", reason="the extra 'test' brings NVRTC for Linux only")
def test_kernels_are_compiled_without_a_gpu_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, one_source: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    fake_cupy.install(monkeypatch, None, print)
    here = machines.look()
    assert here.toolchain is not None
    (compiled,) = compilation.compile_all(replace(here, gpus=(), hip=None))
    assert (compiled.source, compiled.architecture, compiled.error) == (
        "update_scale.cu",
        "sm_90",
        "",
    )
    assert compiled.seconds > 0
    assert list(tmp_path.iterdir()) == []
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path)


def test_a_source_that_does_not_compile_is_broken_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, one_source: None
) -> None:
    def refuse(name: str, architecture: str) -> bytes:
        raise RuntimeError(f"NVRTC:\n{architecture} is unknown\n")

    monkeypatch.setattr(cuda_compiler, "machine_code", refuse)
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    compiled = compilation.compile_all(replace(CPU, toolchain=TOOLCHAIN))
    assert "CUPY_CACHE_DIR" not in os.environ
    assert compiled[0].error == "RuntimeError: sm_90 is unknown"
    for machine, state in ((GOOD, "broken"), (CPU, "note")):
        (found,) = compilation.judge(machine, compiled)
        assert found.state == state
        assert (
            found.text
            == "update_scale.cu does not compile for sm_90: RuntimeError: sm_90 is unknown"
        )


def test_a_source_that_compiles_and_cannot_be_loaded_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Modules:
        def failure(self, sources: list[str], device: torch.device) -> Failure | None:
            refused = sources == ["cast.cu"]
            return Failure("cast.cu", RuntimeError("no image")) if refused else None

    def compiles(name: str, architecture: str) -> bytes:
        if name == "unscale.cu":
            raise RuntimeError("NVRTC: no")
        return b""

    monkeypatch.setattr(compilation, "CudaModules", Modules)
    monkeypatch.setattr(cuda_compiler, "machine_code", compiles)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    compiled = compilation.compile_all(replace(GOOD, toolchain=TOOLCHAIN))
    found = {one.source: one.error for one in compiled if one.error}
    assert found == {
        "unscale.cu": "RuntimeError: NVRTC: no",
        "loading cast.cu": "RuntimeError: no image",
    }


def test_without_a_compiler_it_is_said_that_nothing_was_compiled() -> None:
    assert compilation.compile_all(CPU) == []
    (found,) = compilation.judge(CPU, [])
    assert found.state == "ok"
    assert "were not compiled" in found.text


def test_on_rocm_nothing_is_asked_of_cuda() -> None:
    rocm = replace(GOOD, cuda=None, hip="6.4", toolchain=None)
    rocm = replace(rocm, packages=dict.fromkeys(machines.OPTIONAL, "1.0"))
    assert said(rocm) == []
    assert compilation.compile_all(rocm) == []
    assert compilation.judge(rocm, [])[0].state == "ok"


def test_all_sources_are_known() -> None:
    folder = Path(__file__).parents[2] / "csrc"
    assert cuda_compiler.sources() == sorted(path.name for path in folder.glob("*.cu"))


# --- speed ---


class Clock:
    """A clock that only runs of work move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *seconds: float) -> Callable[[], None]:
        times = itertools.cycle(seconds)

        def run() -> None:
            self.now += next(times)

        return run


def test_dtypes_are_compared_in_turns_by_medians() -> None:
    clock = Clock()
    order: list[str] = []

    def noted(name: str, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: (order.append(name), run())  # type: ignore[return-value]

    runs = {
        "float32": noted("float32", clock.work(4.0)),
        "float16": noted("float16", clock.work(9.0, 2.0, 2.0, 90.0, 2.0, 2.0)),
        "bfloat16": noted("bfloat16", clock.work(9.0, 8.0)),
    }
    fast, slow = speed.compare("matmul", runs, 0.0, clock)
    assert order == ["float32", "float16", "bfloat16"] * 6  # the first round is not counted
    assert (fast.dtype, fast.rounds, fast.float32_ms, fast.half_ms) == ("float16", 5, 4e3, 2e3)
    assert fast.ratio == 2.0  # one round of 90 s moves no median
    assert fast.is_fast
    assert not slow.is_fast


def test_rounds_end_with_the_time_that_is_given() -> None:
    clock = Clock()
    runs = {"float32": clock.work(1.0), "float16": clock.work(1.0)}
    assert speed.compare("matmul", runs, 20.0, clock)[0].rounds == 11
    assert speed.compare("matmul", runs, 1e9, clock)[0].rounds == 50


def test_a_size_is_chosen_that_can_be_measured() -> None:
    assert speed.choose_size(lambda size: size * 1e-5, 4e-3, 10.0, 64, 8192) == 512
    assert speed.choose_size(lambda size: 0.0, 4e-3, 10.0, 64, 8192) == 8192
    assert speed.choose_size(lambda size: 1.0, 4e-3, 10.0, 64, 8192) == 64


def measured(fp16: float, bf16: float, spread: float = 0.0) -> list[Speed]:
    return [
        Speed("matmul 8 x 8", dtype, 1.0, 1 / ratio, ratio, (ratio - spread, ratio + spread), 9)
        for dtype, ratio in (("float16", fp16), ("bfloat16", bf16))
    ]


ALL = [Outcome(name, 0.0, 1.0) for name in levels.OPT_LEVELS]


@pytest.mark.parametrize(
    ("fp16", "bf16", "spread", "level"),
    [
        (8.0, 8.0, 0.1, "O4"),
        (8.0, 5.0, 0.1, "O1"),
        (8.0, 0.5, 0.1, "O1"),
        (0.1, 1.6, 0.1, "O4"),
        (0.9, 1.1, 0.1, "O0"),
        (3.0, 3.0, 2.5, "O0"),  # noise
    ],
)
def test_a_level_is_advised_by_what_is_fast(
    fp16: float, bf16: float, spread: float, level: str
) -> None:
    assert advise(measured(fp16, bf16, spread), ALL).level == level


def test_no_level_is_advised_whose_step_is_wrong() -> None:
    tested = [replace(one, error=2.0) if one.level == "O4" else one for one in ALL]
    assert advise(measured(8.0, 8.0), tested).level == "O1"
    assert advise(measured(8.0, 8.0), []).level == "O0"


# --- the step at each level ---


def test_a_step_is_right_at_every_level(amp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(requested_level.FORCED_BY, "O3")  # is not to reach it
    tested = self_test.check_levels(torch.device("cpu"))
    assert [one.level for one in tested] == list(levels.OPT_LEVELS)
    assert all(one.passed for one in tested)
    assert {one.state for one in self_test.judge(tested)} == {"ok"}
    assert os.environ[requested_level.FORCED_BY] == "O3"


def test_a_wrong_step_and_one_that_raises_are_broken(amp, monkeypatch: pytest.MonkeyPatch) -> None:
    real = amp.scale_loss

    def wrong(loss: torch.Tensor, optimizer: Any) -> Any:
        level = next(names)
        if level == "O5":
            raise RuntimeError("not here")
        return real(loss * (1.2 if level == "O1" else 1.0), optimizer)

    names = iter(levels.OPT_LEVELS)
    monkeypatch.setattr(amp, "scale_loss", wrong)
    tested = {one.level: one for one in self_test.check_levels(torch.device("cpu"))}
    assert [name for name, one in tested.items() if not one.passed] == ["O1", "O5"]
    found = {one.text[:2]: one for one in self_test.judge(list(tested.values()))}
    assert "off by 2.0e-01" in found["O1"].text
    assert found["O5"].text == "O5: the step raised RuntimeError: not here"
    assert {found["O1"].state, found["O5"].state} == {"broken"}


# --- what is printed ---


def report(*findings: Finding) -> Report:
    return Report("the CPU", findings, [], measured(1.0, 2.0), ALL, Advice("O4", "it is fast."))


def test_lines_are_no_longer_than_sixty_characters() -> None:
    path = "/a/path/that/is/longer/than/one/line/of/sixty/characters/would/hold/of/it/by/far"
    lines = [line for line, _ in report(Finding("x", "broken", f"{path} {path}", "pip x")).lines()]
    assert max(map(len, lines)) <= 60
    assert "        -> pip x" in lines
    assert lines[-1].startswith("1 broken; ")


def test_what_must_be_typed_is_not_broken_in_a_word() -> None:
    mend = "pip install 'amp_patch[cuda13]' " + "x" * 70
    lines = [line for line, _ in report(Finding("x", "note", "y", mend)).lines()]
    assert any(line.endswith("x" * 70) for line in lines)
    assert lines[-1] == "All is well."


def test_json_holds_everything_and_no_infinity() -> None:
    broken = replace(report(Finding("x", "broken", "y")), tested=[Outcome("O1", float("inf"), 1.0)])
    content = json.loads(broken.to_json(), parse_constant=pytest.fail)
    assert content["ok"] is False
    assert content["findings"] == [{"topic": "x", "state": "broken", "text": "y", "mend": ""}]
    assert content["levels"][0]["error"] is None
    assert content["start_with"] == {"level": "O4", "reason": "it is fast."}
    assert [one["dtype"] for one in content["speed"]] == ["float16", "bfloat16"]


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_command_says_how_this_machine_is(
    amp, monkeypatch: pytest.MonkeyPatch, one_source: None, has_rich: bool
) -> None:
    monkeypatch.delenv("AMP_PATCH_KERNELS", raising=False)
    if not has_rich:
        # another test may have imported it
        monkeypatch.delitem(sys.modules, "amp_patch.tools.rich_parts", raising=False)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    result = CliRunner().invoke(command_line.main, ["doctor", "--seconds", "0"])
    lines = result.output.splitlines()
    assert any(re.match(r"Start with O[014]: ", line) for line in lines)
    assert sum(line.startswith("ok      O") for line in lines) == 6
    assert result.exit_code == (0 if lines[-1] == "All is well." else 1)
    assert "\x1b" not in result.output
    if not torch.cuda.is_available():
        assert result.exit_code == 0
        assert max(map(len, lines)) <= 60


def test_a_device_that_cannot_be_measured_is_broken(
    amp, monkeypatch: pytest.MonkeyPatch, one_source: None
) -> None:
    def fail(device: torch.device, seconds: float) -> list[Speed]:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(speed, "measure", fail)
    result = CliRunner().invoke(command_line.main, ["doctor"])
    assert result.exit_code == 1
    assert "the speed could not be measured: no memory is left" in " ".join(result.output.split())
    assert "Start with O0" in result.output


def test_the_command_writes_json_and_fails_where_something_is_broken(
    amp, monkeypatch: pytest.MonkeyPatch, one_source: None
) -> None:
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "02")
    monkeypatch.setenv("AMP_PATCH_RULES", "missing.toml")
    result = CliRunner().invoke(command_line.main, ["doctor", "--json", "--seconds", "0"])
    content = json.loads(result.output)
    assert result.exit_code == 1
    assert not content["ok"]
    assert [one["passed"] for one in content["levels"]] == [True] * 6
