"""Compiles every CUDA source as training would, and notes how long each takes; keeps nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from amp_patch.kernels import cuda_compiler
from amp_patch.kernels.cuda_module import CudaModules

from .finding import Finding
from .machine import Machine

#: What is compiled for where no GPU says otherwise: H100's.
_ARCHITECTURE = "sm_90"


@dataclass(frozen=True)
class Compiled:
    """A CUDA source.

    Attributes:
        source: ``"cast.cu"``.
        architecture: that it was compiled for.
        seconds: that this took.
        error: the last line of what was wrong; "" where nothing was.
    """

    source: str
    architecture: str
    seconds: float
    error: str = ""


def compile_all(machine: Machine) -> list[Compiled]:
    """Compile each source anew; none where there is nothing to compile with."""
    if machine.toolchain is None or machine.hip:
        return []
    architecture = _ARCHITECTURE
    if machine.gpus:
        architecture = "sm_{}{}".format(*machine.gpus[0].capability)
    with _empty_cache():
        compiled = [_compile(name, architecture) for name in cuda_compiler.sources()]
        return [*compiled, *_load(machine, compiled)]


def judge(machine: Machine, compiled: list[Compiled]) -> list[Finding]:
    """Return what is to be said of it."""
    if machine.hip:
        text = "the CUDA kernels are for NVIDIA's GPUs; on ROCm torch's functions do their work"
        return [Finding("kernels", "ok", text)]
    if not compiled:
        text = "the CUDA kernels were not compiled: that takes cupy, NVRTC and CUDA's headers"
        return [Finding("kernels", "note" if machine.gpus else "ok", text)]
    failed = [one for one in compiled if one.error]
    seconds = sum(one.seconds for one in compiled)
    architecture = compiled[0].architecture
    how = "" if machine.gpus else ", which no GPU here can run"
    if not failed:
        text = f"{len(compiled)} CUDA sources compiled for {architecture} in {seconds:.1f} s{how}"
        return [Finding("kernels", "ok", text)]
    return [
        Finding(
            "kernels",
            "broken" if machine.gpus else "note",
            f"{one.source} does not compile for {one.architecture}: {one.error}",
            "AMP_PATCH_KERNELS=torch (trains without the kernels), and report it",
        )
        for one in failed
    ]


def _compile(name: str, architecture: str) -> Compiled:
    begin = time.perf_counter()
    error = ""
    try:
        cuda_compiler.machine_code(name, architecture)
    except Exception as problem:  # whatever it is, it is told
        error = _last_line(problem)
    return Compiled(name, architecture, time.perf_counter() - begin, error)


def _load(machine: Machine, compiled: list[Compiled]) -> Iterator[Compiled]:
    """Yield what is wrong where a source that compiles cannot be loaded."""
    if not machine.gpus:
        return
    modules = CudaModules()
    device = torch.device("cuda", torch.cuda.current_device())
    for one in compiled:
        begin = time.perf_counter()
        failure = None if one.error else modules.failure([one.source], device)
        if failure is not None:
            seconds, error = time.perf_counter() - begin, _last_line(failure.error)
            yield Compiled(f"loading {one.source}", one.architecture, seconds, error)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Keep what is compiled in the block out of cupy's cache, in which it may be already."""
    before = os.environ.get("CUPY_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUPY_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["CUPY_CACHE_DIR"]
            if before is not None:
                os.environ["CUPY_CACHE_DIR"] = before
