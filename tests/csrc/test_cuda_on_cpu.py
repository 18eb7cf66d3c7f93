"""The emulation that kernels are tested with: it finds what a GPU does not allow."""

import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import THREADS, Kernels, LaunchError
from cuda_on_cpu.kernel_names import DTYPES

# Each misuse: the kernel that commits it, and what must be said of it.
MISUSES = {
    "unreached_barrier": (
        "(float*) { if (threadIdx.x != 7) __syncthreads(); }",
        "the barrier in line [0-9]+ is not reached by all threads",
    ),
    "barrier_in_two_lines": (
        "(float*) { if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads(); }",
        "the barrier in line [0-9]+ is not reached by all threads",
    ),
    "unreached_shuffle": (
        "(float* p) { if (threadIdx.x != 7) *p = __shfl_xor_sync(0xffffffffu, 1.0f, 1); }",
        "the shuffle in line [0-9]+ is not reached by all threads",
    ),
    "shuffle_of_a_part": (
        "(float* p) { *p = __shfl_xor_sync(1u, 1.0f, 1); }",
        "a shuffle of a part of a warp is not emulated",
    ),
    "misaligned_pack": (
        "(float* p) { store(p + 1, load<4>(p)); }",
        "sweep.cuh, line [0-9]+: an access to an address not aligned to 16 bytes",
    ),
    "misaligned_halves": (
        "(float16* p) { load<4>(p + 2); }",
        "sweep.cuh, line [0-9]+: an access to an address not aligned to 8 bytes",
    ),
    "null_address": (
        "(float* p) { if (p) p = nullptr; *p = 1.0f; }",
        "line [0-9]+: an access to address 0",
    ),
    "unfenced_atomic": (
        "(unsigned* p) { atomicInc(p, 5); }",
        r"line [0-9]+: an atomic without __threadfence\(\) before it",
    ),
    "fenced_before_a_barrier": (
        "(unsigned* p) { __threadfence(); __syncthreads(); atomicInc(p, 5); }",
        r"line [0-9]+: an atomic without __threadfence\(\) before it",
    ),
}
CONVERT = """(const {source}* source, {target}* target, int length) {{
    for (int i = threadIdx.x; i < length; i += THREADS) {{
        round_to(target[i], to_float(source[i]));
    }}
}}"""
HALVES = ("float16", "bfloat16")
CODE = {
    **{name: code for name, (code, _) in MISUSES.items()},
    **{f"widen_{half}": CONVERT.format(source=half, target="float32") for half in HALVES},
    **{f"round_{half}": CONVERT.format(source="float32", target=half) for half in HALVES},
    "reverse": """(int* out, int barrier) {
        __shared__ int numbers[THREADS];
        numbers[threadIdx.x] = threadIdx.x;
        if (barrier) __syncthreads();
        out[blockIdx.x * blockDim.x + threadIdx.x] = numbers[THREADS - 1 - threadIdx.x];
    }""",
    "order": """(int* order, int* count) {
        order[blockIdx.x * blockDim.x + threadIdx.x] = (*count)++;
    }""",
    "warp_sum": """(double* out) {
        double mine = threadIdx.x;
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
        }
        out[threadIdx.x] = mine;
    }""",
    "ticket": "(unsigned* p) { __threadfence(); atomicInc(p, THREADS + 3); }",
    "echo": """(double* out, int a, long long b, float c, double d, const float* none) {
        out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = none == nullptr;
    }""",
}


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    lines = [f'#include "{name}"' for name in ("dtypes.cuh", "sweep.cuh")]
    lines += [f'extern "C" __global__ void {name}{code}' for name, code in CODE.items()]
    return cuda_on_cpu.compiled_text("emulation", "\n".join(lines), CODE, pytestconfig)


def test_a_missing_barrier_shows(kernels: Kernels) -> None:
    expected = torch.arange(THREADS, dtype=torch.int32).flip(0).repeat(3)
    out = torch.empty(3 * THREADS, dtype=torch.int32)
    kernels.launch("reverse", 3, out, 1)
    assert torch.equal(out, expected)
    kernels.launch("reverse", 3, out, 0)
    wrong = (out != expected).reshape(3, THREADS)
    assert wrong.any(1).all()
    assert (out.reshape(3, THREADS)[wrong] == -1).all()  # no block sees another's shared memory


def test_threads_and_blocks_run_in_another_order_for_each_seed(kernels: Kernels) -> None:
    def order(seed: int) -> list[int]:
        out, count = torch.empty(4 * THREADS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        kernels.launch("order", 4, out, count, seed=seed)
        assert sorted(out.tolist()) == list(range(4 * THREADS))
        return out.tolist()

    assert order(1) == order(1) != order(2)
    assert {order(seed).index(0) // THREADS for seed in range(30)} == {0, 1, 2, 3}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_a_gpu_does_not_allow_is_an_error(kernels: Kernels, misuse: str) -> None:
    memory = torch.zeros(64)
    with pytest.raises(LaunchError, match=f"^{misuse}: .*{MISUSES[misuse][1]}$"):
        kernels.launch(misuse, 1, memory)


def test_shuffles_exchange_within_the_warp(kernels: Kernels) -> None:
    out = torch.empty(THREADS, dtype=torch.float64)
    kernels.launch("warp_sum", 1, out)
    sums = torch.arange(THREADS, dtype=torch.float64).reshape(-1, 32).sum(1)
    assert torch.equal(out, sums.repeat_interleave(32))


def test_the_ticket_counts_and_wraps(kernels: Kernels) -> None:
    ticket = torch.zeros(1, dtype=torch.int32)
    kernels.launch("ticket", 1, ticket)
    assert ticket.item() == THREADS
    kernels.launch("ticket", 1, ticket)
    assert ticket.item() == THREADS - 4


def test_arguments_arrive_by_their_types(kernels: Kernels) -> None:
    out = torch.empty(5, dtype=torch.float64)
    kernels.launch("echo", 1, out, -3, 2**40, 0.5, 1 / 3, None)
    assert out.tolist() == [-3, 2**40, 0.5, 1 / 3, 1]
    with pytest.raises(AssertionError, match="echo takes PiqfdP"):
        kernels.launch("echo", 1, out)


def same_bits_or_nan(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    same = ours.view(integer) == theirs.view(integer)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


@pytest.mark.parametrize("half", HALVES)
def test_halves_widen_and_round_as_torchs(kernels: Kernels, half: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[half])
    widened = torch.empty(len(every))
    kernels.launch(f"widen_{half}", 1, every, widened, len(every))
    assert same_bits_or_nan(widened, every.float())


@pytest.mark.parametrize("half", HALVES)
def test_floats_round_to_halves_as_torchs(kernels: Kernels, half: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[half]).float()
    between = (every[1:].double() + every[:-1].double()) / 2
    ties = between.float()
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (2**17,), generator=generator).to(torch.int32)
    above, below = (torch.nextafter(ties, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    source = torch.cat([every, ties, above, below, any_bits.view(torch.float32)])
    rounded = torch.empty(len(source), dtype=DTYPES[half])
    kernels.launch(f"round_{half}", 1, source, rounded, len(source))
    assert same_bits_or_nan(rounded, source.to(DTYPES[half]))


def test_without_a_compiler_tests_are_skipped_with_the_reason(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_on_cpu, "COMPILER", None)
    with pytest.raises(pytest.skip.Exception, match=r"^no C\+\+ compiler on the PATH: g\+\+"):
        cuda_on_cpu.compiled("cast.cu", pytestconfig)


@pytest.mark.parametrize("there", [False, True])
def test_ci_installs_the_compiler_where_there_is_none(
    pytestconfig: pytest.Config, tmp_path: Path, there: bool
) -> None:
    script = (pytestconfig.rootpath / ".ci" / "run").read_text(encoding="utf-8")
    lines = re.search(r"^missing=\(\)\n.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert lines
    bash = str(shutil.which("bash"))
    (tmp_path / "bash").symlink_to(bash)
    for name in ("apt-get", "chromium", "g++") if there else ("apt-get", "chromium"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    command = [bash, "-euo", "pipefail", "-c", f"{lines[0]}\ninstall_missing"]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    install = "-qq update\n-qq install -y --no-install-recommends g++\n"
    assert run.stdout == ("" if there else install)


@dataclass(frozen=True)
class Config:
    """All that compiling needs to know of pytest."""

    rootpath: Path


def test_a_library_is_compiled_again_when_a_header_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_on_cpu.require_compiler()
    shutil.copytree(cuda_on_cpu.CSRC, tmp_path / "csrc")
    monkeypatch.setattr(cuda_on_cpu, "CSRC", tmp_path / "csrc")
    made: list[Path] = []
    monkeypatch.setattr(cuda_on_cpu, "load", lambda library, text: made.append(library))
    arguments: Any = ("cast.cu", Config(tmp_path))
    cuda_on_cpu.compiled(*arguments)
    cuda_on_cpu.compiled(*arguments)
    header = tmp_path / "csrc" / "sweep.cuh"
    header.write_text(header.read_text(encoding="utf-8") + "//\n", encoding="utf-8")
    cuda_on_cpu.compiled(*arguments)
    assert made[0] == made[1] != made[2]
    assert made[0].parent == tmp_path / "build" / "cuda_on_cpu"
    assert re.fullmatch(r"cast-[0-9a-f]{16}\.so", made[0].name)


def test_a_library_is_compiled_once_for_all_who_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compile_slowly(library: Path, text: str) -> None:
        made.append(text)
        time.sleep(0.1)
        library.touch()

    monkeypatch.setattr(cuda_on_cpu, "_compile", compile_slowly)
    monkeypatch.setattr(cuda_on_cpu, "Kernels", lambda library: library.is_file())
    library = tmp_path / "folder" / "kernels.so"
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda text: cuda_on_cpu.load(library, text), "abc"))
    assert len(made) == 1


def test_a_launch_after_an_error_starts_afresh(kernels: Kernels) -> None:
    out = torch.empty(THREADS, dtype=torch.int32)
    for threads in (THREADS, 64):
        with pytest.raises(LaunchError, match="barrier"):
            kernels.launch("unreached_barrier", 1, torch.zeros(1), threads=threads)
        kernels.launch("reverse", 1, out, 1)
        assert torch.equal(out, torch.arange(THREADS, dtype=torch.int32).flip(0))
