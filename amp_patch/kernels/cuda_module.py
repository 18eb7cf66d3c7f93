"""Loads compiled CUDA kernels and launches them on torch's stream; knows no kernel by name.

Tensors go to a kernel as their addresses and all memory is torch's.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_compiler

#: Threads of a block, as in tensor_table.cuh.
THREADS = 256
#: A kernel's parameters, by letters as in the module struct, P for an address; each in 8 bytes.
_IN_8_BYTES = {"P": "Q", "i": "i4x", "q": "q", "f": "f4x", "d": "d"}

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


class Failure(NamedTuple):
    """Why kernels cannot be launched.

    Attributes:
        source: the one that could not be compiled or loaded; None where all lack what they need.
        error: what was raised.
    """

    source: str | None
    error: Exception


def packed(parameters: str, arguments: Sequence[Argument]) -> tuple[array[int], array[int]]:
    """Lay the arguments of a launch in memory, 8 bytes for each, as the driver reads them.

    Args:
        parameters: a letter for each of "iqfd", as in the module struct, or P for an address.
        arguments: a tensor goes as its address, None as the null address.

    Returns:
        Their addresses, and what these lead to; both must live until the launch has returned.

    Raises:
        ValueError: there are more or fewer arguments than parameters.
    """
    numbers = [
        argument.data_ptr()
        if isinstance(argument, Tensor)
        else (0 if argument is None else argument)
        for argument, _ in zip(arguments, parameters, strict=True)
    ]
    try:
        memory = _layout(parameters).pack(*numbers)
    except OverflowError:  # a number beyond float32, which is inf there
        numbers = [
            ctypes.c_float(number).value if letter == "f" else number
            for number, letter in zip(numbers, parameters, strict=True)
        ]
        memory = _layout(parameters).pack(*numbers)
    values = array("Q", memory)
    first, count = values.buffer_info()
    return array("Q", range(first, first + 8 * count, 8)), values


@functools.cache
def _layout(parameters: str) -> struct.Struct:
    return struct.Struct("=" + "".join(map(_IN_8_BYTES.__getitem__, parameters)))


class CudaModules:
    """The kernels of all sources on all devices, each source compiled and loaded when needed."""

    def __init__(self) -> None:
        self._cuda: Any = None  # cupy's, where a module was loaded
        self._contexts: dict[int, int] = {}  # of the devices on which any was
        self._modules: dict[tuple[str, int], Any] = {}
        self._functions: dict[tuple[str, str, int], Any] = {}
        self._failures: dict[tuple[str, int], Failure] = {}
        self._failed_devices: dict[int, Failure] = {}

    def failure(self, sources: Iterable[str], device: torch.device) -> Failure | None:
        """Compile and load sources for a device; return why the first fails, None where all work.

        What has failed is not tried again until `forget_failures`; other sources are, unless
        nothing can be loaded on the device.
        """
        index = _index(device)
        for source in sources:
            if (source, index) not in self._modules:
                self._try(source, index)
                failure = self._failed_devices.get(index) or self._failures.get((source, index))
                if failure is not None:
                    return failure
        return None

    def forget_failures(self) -> None:
        """Have the next call try again what failed: what was missing may have been installed."""
        self._failures.clear()
        self._failed_devices.clear()

    def launch(self, kernel: Kernel, grid: int, device: torch.device, *arguments: Argument) -> None:
        """Run a kernel on the device's current stream, without waiting for it.

        The current device is what it was before.

        Args:
            kernel: what to launch.
            grid: number of blocks, above 0.
            device: of all tensors.
            arguments: one per parameter; a tensor goes as its address, None as the null address.
        """
        index = _index(device)
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                self.launch(kernel, grid, device, *arguments)
            return
        addresses, _values = packed(kernel.parameters, arguments)
        if index not in self._contexts:
            self._module(kernel.source, index)
        # The driver, unlike torch's own launches, does not bind a thread to the device's context,
        # in which functions are looked up, too.
        if self._cuda.driver.ctxGetCurrent() != self._contexts[index]:
            self._cuda.runtime.setDevice(index)
        function = self._function(kernel, index)
        self._cuda.driver.launchKernel(
            function.ptr,
            *(grid, 1, 1),
            *(kernel.threads, 1, 1),
            0,
            stream_on(device),
            addresses.buffer_info()[0],
            0,
        )

    def _try(self, source: str, index: int) -> None:
        """Load a source, or note why that fails: whatever it is, torch does without the kernels."""
        if (source, index) in self._failures or index in self._failed_devices:
            return
        try:
            cuda_compiler.toolchain()  # without which none is compiled
        except Exception as error:
            self._failed_devices[index] = Failure(None, error)
            return
        try:
            self._module(source, index)
        except Exception as error:
            if self._has_another(source, index):
                self._failures[source, index] = Failure(source, error)
            else:  # a compiler or a driver that is too old, say
                self._failed_devices[index] = Failure(None, error)

    def _has_another(self, source: str, index: int) -> bool:
        """Return whether some other source works on the device, where one has failed."""
        if any(on == index for _, on in self._modules):
            return True
        another = next(one for one in cuda_compiler.sources() if one != source)
        try:
            self._module(another, index)
        except Exception:  # it does not either
            return False
        return True

    def _function(self, kernel: Kernel, index: int) -> Any:
        key = (kernel.source, kernel.name, index)
        if key not in self._functions:
            self._functions[key] = self._module(kernel.source, index).get_function(kernel.name)
        return self._functions[key]

    def _module(self, source: str, index: int) -> Any:
        if (source, index) not in self._modules:
            import cupy.cuda

            major, minor = torch.cuda.get_device_capability(index)
            code = cuda_compiler.machine_code(source, f"sm_{major}{minor}")
            with torch.cuda.device(index):
                cupy.cuda.runtime.setDevice(index)  # torch has bound no thread to the current one
                module = cupy.cuda.Module()
                module.load(code)
                self._cuda = cupy.cuda  # first, for other threads ask for the context
                self._contexts[index] = cupy.cuda.driver.ctxGetCurrent()
            self._modules[source, index] = module
        return self._modules[source, index]


def stream_on(device: torch.device) -> int:
    """Return the address of a CUDA device's current stream; torch's object for it takes longer."""
    address: int = torch._C._cuda_getCurrentRawStream(_index(device))
    return address


def stream_object_on(device: torch.device) -> torch.cuda.Stream:
    """Return torch's object for a CUDA device's current stream, which is made once for each."""
    return _stream_object(_index(device), stream_on(device))


@functools.lru_cache(maxsize=256)
def _stream_object(index: int, address: int) -> torch.cuda.Stream:
    """Return the object; this is called while it is the current stream that has the address."""
    return torch.cuda.current_stream(index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


#: Of the whole process, which is what the driver loads a module into: once for each device.
modules = CudaModules()
