"""NVIDIA's compute-sanitizer finds nothing in our kernels; what it finds in torch's is shown.

One test per tool, so that each can be run by itself: ``-k memcheck``.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType

import cuda_on_cpu
import kernel_steps
import pytest
import torch
from cuda_on_cpu.fake_gpu import Gpu
from cuda_on_cpu.kernel_names import KERNELS

from amp_patch.step import loss_scaling

SECONDS = 420
#: Of each tool, so many kinds of reports are shown: an initcheck of torch's kernels has thousands.
KINDS = 20
# no allocator between the tensors: what lies after a tensor's end is nobody's
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# a call that cupy makes for us is ours, too
OURS = re.compile(rf"\b({'|'.join(chain.from_iterable(KERNELS.values()))})\b|/cupy")


def reports(output: str) -> list[str]:
    """Split what the sanitizer prints into its reports; the lines of others are left out."""
    lines = re.findall(r"^========= ?(.*)$", output, re.MULTILINE)
    found: list[str] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1] += f"\n{line}"
        elif line.strip() and not line.startswith(
            ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK")
        ):
            found.append(line)
    return found


def counted(found: list[str]) -> str:
    """Return how often each kind of report is there, with the first report of each in full."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for report in found:
        what, where, *_ = [*report.splitlines(), ""]
        kinds.setdefault((what, where.partition("+0x")[0]), []).append(report)
    most = sorted(kinds.values(), key=len, reverse=True)[:KINDS]
    return "\n".join(f"{len(alike)} of these:\n{alike[0]}" for alike in most)


def of_us(output: str) -> list[str]:
    """Return the reports that name a kernel or a call of ours."""
    return [report for report in reports(output) if OURS.search(report)]


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is missing")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    pytest.importorskip("cupy", reason="cupy is missing: see the extra 'cuda13'")
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000"]
    run = subprocess.run(
        [*command, sys.executable, str(Path(kernel_steps.__file__))],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    output = run.stdout + run.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer: Device not supported")
    print(counted(reports(output)))
    assert not counted(of_us(output))
    assert "SUMMARY" in output, output[-2000:]  # it ran to its end
    assert run.returncode == 0, output[-2000:]


def test_the_sanitized_script_launches_kernels_of_every_source(
    amp: ModuleType, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    cuda_on_cpu.require_compiler()
    modules = Gpu(monkeypatch, pytestconfig).modules
    monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
    kernel_steps.launch_every_kernel(amp, torch.device("cpu"))
    launched = set(modules.launched)
    assert [source for source, names in KERNELS.items() if not launched.intersection(names)] == []


TORCHS = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::amp_update_scale_cuda_kernel<float>(float *, int)+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========
a line of the script
========= ERROR SUMMARY: 1 error
"""
OF_A_KERNEL = """\
========= Invalid __global__ read of size 2 bytes
=========     at unscale_float16_to_float32+0x3f0
=========     by thread (31,0,0) in block (1,0,0)
========= ERROR: Race reported between Read access at 0x6360 in summarize
=========     and Write access at 0x1fe0 in summarize [32 hazards]
"""
OF_A_CALL = """\
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) on CUDA API call to cuLaunchKernel.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x1] in /venv/cupy_backends/cuda/api/driver.so
=========         Host Frame: launchKernel in /venv/cupy/cuda/driver.so
"""


def test_reports_are_told_from_each_other_and_ours_from_torchs() -> None:
    assert len(reports(TORCHS)) == 1
    assert of_us(TORCHS) == []
    both = TORCHS + OF_A_KERNEL + OF_A_CALL
    assert len(reports(both)) == 4
    assert counted(reports(both) * 3).count("3 of these:") == 4
    first = [report.partition("\n")[0] for report in of_us(both)]
    assert [line[:12] for line in first] == ["Invalid __gl", "ERROR: Race ", "Program hit "]
