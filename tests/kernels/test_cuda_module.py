"""Loading and launching kernels: what the driver gets, on which device and stream."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fake_cupy
import pytest
import torch
from test_cuda_compiler import cache, linux_only  # noqa: F401 - a fixture

from amp_patch.kernels import cuda_module
from amp_patch.kernels.cuda_module import CudaModules, Kernel

RECONCILE = Kernel("reconcile.cu", "reconcile_float16", "PP")
UPDATE = Kernel("update_scale.cu", "update_scale", "PPiddqqff", 32)


@dataclass
class Gpus:
    """Two GPUs that only take notes."""

    current: int = 0
    used: list[int] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    cuda: Any = None

    @contextlib.contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        index = device if isinstance(device, int) else device.index
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def launch(self, *arguments: int) -> None:
        """Read the C values while they are alive, as cuLaunchKernel does."""
        addresses = ctypes.cast(arguments[-2], ctypes.POINTER(ctypes.c_void_p))
        self.used.append(self.current)
        self.launches.append((*arguments[:-2], addresses, arguments[-1]))
        self.values = [
            ctypes.cast(addresses[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(self.kinds)
        ]

    kinds: tuple[Any, ...] = (ctypes.c_longlong, ctypes.c_longlong)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, cache: Any) -> Gpus:  # noqa: F811 - the fixture
    gpus = Gpus()
    gpus.cuda = fake_cupy.install(monkeypatch, None, gpus.launch)
    monkeypatch.setattr(torch.cuda, "device", gpus.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 700 + index, raising=False
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 - index, 0))
    return gpus


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


@linux_only
def test_a_launch_goes_to_the_tensors_device_and_its_current_stream(gpus: Gpus) -> None:
    rows, chunks = torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    CudaModules().launch(RECONCILE, 7, gpu(1), rows, chunks)
    ((function, *shape, shared, stream, _, extra),) = gpus.launches
    assert shape == [7, 1, 1, 256, 1, 1]
    assert (shared, stream, extra) == (0, 701, 0)
    assert gpus.values == [rows.data_ptr(), chunks.data_ptr()]
    assert (gpus.used, gpus.current) == ([1], 0)
    assert gpus.cuda.nvrtc.options[0][0] == "--gpu-architecture=sm_80"


@linux_only
@pytest.mark.parametrize("context", [0, 100, 7], ids=["none", "another device's", "a foreign one"])
def test_a_thread_is_bound_to_the_devices_context_before_its_functions_are_looked_up(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """As that of a backward, which may be the first to launch a kernel of a loaded source."""
    modules, driver, rows = CudaModules(), gpus.cuda.driver, torch.zeros(3)
    assert modules.failure(["reconcile.cu"], gpu(1)) is None
    assert driver.context == 101
    driver.context = context
    found: list[int] = []
    monkeypatch.setattr(driver, "launchKernel", lambda *_: found.append(driver.context))
    for _ in range(2):
        modules.launch(RECONCILE, 1, gpu(1), rows, rows)
        modules.launch(UPDATE, 1, gpu(1), rows, None, True, 2.0, 0.1, 2, 3, 0.1, 1.0)
    assert found == [101] * 4


@linux_only
def test_every_argument_has_its_c_type(gpus: Gpus) -> None:
    state = torch.zeros(40, dtype=torch.uint8)
    kinds = ("longlong", "longlong", "int", "double", "double", "longlong", "longlong")
    gpus.kinds = tuple(getattr(ctypes, f"c_{kind}") for kind in (*kinds, "float", "float"))
    arguments = (state, None, True, 2.0, 0.1, 2**40, 3, 0.1, 1e40)
    CudaModules().launch(UPDATE, 1, gpu(0), *arguments)
    single = [ctypes.c_float(value).value for value in (0.1, 1e40)]  # the last is inf
    assert gpus.values == [state.data_ptr(), 0, 1, 2.0, 0.1, 2**40, 3, *single]
    assert gpus.launches[0][4:7] == (32, 1, 1)


@linux_only
def test_a_source_is_loaded_once_per_device(gpus: Gpus) -> None:
    modules = CudaModules()
    rows = torch.zeros(3)
    for index in (0, 1, 0, 1):
        assert modules.failure(["reconcile.cu"], gpu(index)) is None
        modules.launch(RECONCILE, 1, gpu(index), rows, rows)
    assert len(gpus.cuda.Module.loaded) == 2
    functions = [launch[0] for launch in gpus.launches]
    assert functions[:2] == functions[2:]
    assert functions[0] != functions[1]


@linux_only
def test_a_device_without_an_index_is_the_current_one(gpus: Gpus) -> None:
    modules = CudaModules()
    gpus.current = 1
    assert modules.failure(["reconcile.cu"], torch.device("cuda")) is None
    assert list(modules._modules) == [("reconcile.cu", 1)]


@linux_only
def test_the_current_device_is_restored_when_a_launch_fails(gpus: Gpus) -> None:
    gpus.kinds = (ctypes.c_longlong,)
    with pytest.raises(ValueError, match="zip"):
        CudaModules().launch(RECONCILE, 1, gpu(1), torch.zeros(1))
    assert gpus.current == 0


def test_without_cupy_nothing_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cupy", "cupy.cuda"):  # the latter is there where cupy has been imported
        monkeypatch.setitem(fake_cupy.sys.modules, module, None)
    modules = CudaModules()
    assert modules.failure([], gpu(0)) is None
    for source in ("reconcile.cu", "cast.cu"):
        failure = modules.failure([source], gpu(0))
        assert failure is not None
        assert (failure.source, type(failure.error)) == (None, ModuleNotFoundError)


@linux_only
def test_a_source_that_failed_is_not_tried_again_and_others_are_loaded(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    compiles = cuda_module.cuda_compiler.machine_code

    def fail(source: str, architecture: str) -> bytes:
        tried.append((source, architecture))
        if source == "unscale.cu":
            raise RuntimeError("NVRTC: no")
        return compiles(source, architecture)

    monkeypatch.setattr(cuda_module.cuda_compiler, "machine_code", fail)
    modules = CudaModules()
    for _ in range(2):
        assert modules.failure(["reconcile.cu"], gpu(0)) is None
        failure = modules.failure(["reconcile.cu", "unscale.cu"], gpu(0))
        assert failure is not None
        assert (failure.source, str(failure.error)) == ("unscale.cu", "NVRTC: no")
    assert tried == [("reconcile.cu", "sm_90"), ("unscale.cu", "sm_90")]
    another = modules.failure(["unscale.cu"], gpu(1))  # another device is asked anew
    assert another is not None
    assert another.source == "unscale.cu"
    modules.forget_failures()
    assert modules.failure(["unscale.cu"], gpu(0)) is not None
    # on a device on which nothing was loaded yet another source is tried as well
    assert [source for source, _ in tried[2:]] == ["unscale.cu", "accumulate.cu", "unscale.cu"]


@linux_only
def test_a_device_on_which_no_source_can_be_loaded_is_told_of_as_a_whole(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is too old for it, say: no further source is compiled."""
    tried = []

    def fail(source: str, architecture: str) -> bytes:
        tried.append(source)
        raise RuntimeError("NVRTC: invalid architecture")

    monkeypatch.setattr(cuda_module.cuda_compiler, "machine_code", fail)
    modules = CudaModules()
    for source in cuda_module.cuda_compiler.sources():
        failure = modules.failure([source], gpu(0))
        assert failure is not None
        assert (failure.source, str(failure.error)) == (None, "NVRTC: invalid architecture")
    assert len(tried) == 2
    modules.forget_failures()
    assert modules.failure(["cast.cu"], gpu(0)) is not None
    assert len(tried) == 4


def test_threads_are_those_of_the_sources() -> None:
    import cuda_on_cpu

    assert cuda_module.THREADS == cuda_on_cpu.THREADS
