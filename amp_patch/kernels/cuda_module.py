"""Loads compiled CUDA kernels and launches them on torch's stream; knows no kernel by name.

Tensors go to a kernel as their addresses and all memory is torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_compiler

#: Threads of a block, as in tensor_table.cuh.
THREADS = 256
#: C's types of a kernel's parameters, by letters as in the module struct; P is an address.
C_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_longlong,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}

#: The dtypes that kernels take, as dtypes.cuh and the kernels' names have them.
DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}

Argument = Tensor | int | float | None


class Kernel(NamedTuple):
    """A kernel: the source that holds it, its name, a letter per parameter, threads per block."""

    source: str
    name: str
    parameters: str
    threads: int = THREADS


def packed(parameters: str, arguments: Sequence[Argument]) -> list[Any]:
    """Return the arguments as C values, which must live until the launch has returned.

    Raises:
        ValueError: there are more or fewer arguments than parameters.
    """
    return [
        C_TYPES[letter](argument.data_ptr() if isinstance(argument, Tensor) else argument)
        for letter, argument in zip(parameters, arguments, strict=True)
    ]


class CudaModules:
    """The kernels of all sources on all devices, each source compiled and loaded when needed.

    Attributes:
        failure: what went wrong at the first source that could not be compiled or loaded.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._modules: dict[tuple[str, int], Any] = {}
        self._functions: dict[tuple[str, str, int], Any] = {}

    def can_launch(self, sources: Iterable[str], device: torch.device) -> bool:
        """Compile and load sources for a device; return whether all of them work.

        Once one has failed none is tried again until `forget_failure`; `failure` says why.
        """
        try:
            for source in () if self.failure else sources:
                self._module(source, _index(device))
        except Exception as error:  # cupy missing, no NVRTC, a driver that is too old: see failure
            self.failure = error
        return self.failure is None

    def forget_failure(self) -> None:
        """Have the next `can_launch` try again: what was missing may have been installed."""
        self.failure = None

    def launch(self, kernel: Kernel, grid: int, device: torch.device, *arguments: Argument) -> None:
        """Run a kernel on the device's current stream, without waiting for it.

        The current device is what it was before.

        Args:
            kernel: what to launch.
            grid: number of blocks, above 0.
            device: of all tensors.
            arguments: one per parameter; a tensor goes as its address, None as the null address.
        """
        from cupy.cuda import driver, runtime

        index = _index(device)
        values = packed(kernel.parameters, arguments)
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with torch.cuda.device(index):
            # torch's block calls CUDA only where the device is to change, and the driver, unlike
            # torch's own launches, does not bind a thread to the device's context.
            if not driver.ctxGetCurrent():
                runtime.setDevice(index)
            driver.launchKernel(
                self._function(kernel, index).ptr,
                *(grid, 1, 1),
                *(kernel.threads, 1, 1),
                0,
                stream_on(device),
                ctypes.addressof(addresses),
                0,
            )

    def _function(self, kernel: Kernel, index: int) -> Any:
        key = (kernel.source, kernel.name, index)
        if key not in self._functions:
            self._functions[key] = self._module(kernel.source, index).get_function(kernel.name)
        return self._functions[key]

    def _module(self, source: str, index: int) -> Any:
        if (source, index) not in self._modules:
            from cupy.cuda import Module

            major, minor = torch.cuda.get_device_capability(index)
            code = cuda_compiler.machine_code(source, f"sm_{major}{minor}")
            with torch.cuda.device(index):
                module = Module()
                module.load(code)
            self._modules[source, index] = module
        return self._modules[source, index]


def stream_on(device: torch.device) -> int:
    """Return the address of a CUDA device's current stream; torch's object for it takes longer."""
    address: int = torch._C._cuda_getCurrentRawStream(_index(device))
    return address


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


#: Of the whole process, which is what the driver loads a module into: once for each device.
modules = CudaModules()
