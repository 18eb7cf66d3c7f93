"""The part of cupy that the package calls: NVRTC is the real one, the driver only takes notes."""

import ctypes
import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DISTRIBUTION = "nvidia-cuda-nvrtc"


class NVRTCError(RuntimeError):
    """What cupy raises where NVRTC does not return 0."""


class Nvrtc(ModuleType):
    """``cupy.cuda.nvrtc`` on the library of the package nvidia-cuda-nvrtc."""

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nvrtc")
        files = importlib.metadata.files(DISTRIBUTION) or []
        library = next(file for file in files if re.search(r"/libnvrtc\.so[.\d]*$", str(file)))
        self._library = ctypes.CDLL(str(library.locate()))
        self.options: list[tuple[str, ...]] = []
        self.alive = 0

    def _call(self, function: str, *arguments: Any) -> None:
        status = self._library[f"nvrtc{function}"](*arguments)
        if status:
            raise NVRTCError(f"{function}: {status}")

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def createProgram(
        self, text: str, name: str, headers: tuple[()], names: tuple[()]
    ) -> ctypes.c_void_p:
        assert headers == names == ()
        program = ctypes.c_void_p()
        texts = (text.encode(), name.encode())
        self._call("CreateProgram", ctypes.byref(program), *texts, 0, None, None)
        self.alive += 1
        return program

    def compileProgram(self, program: ctypes.c_void_p, options: tuple[str, ...]) -> None:
        self.options.append(options)
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("CompileProgram", program, len(options), array)

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._call("DestroyProgram", ctypes.byref(program))
        self.alive -= 1

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._read("CUBIN", program)

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._read("ProgramLog", program).rstrip(b"\0").decode()

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw


class Module:
    """``cupy.cuda.Module``: a kernel is found where the machine code names it."""

    loaded: list[bytes]
    driver: "Driver"

    def load(self, code: bytes) -> None:
        self.code, self.context = code, self.driver.context
        assert self.context != 0, "a module is loaded into the thread's context"
        self.loaded.append(code)

    def get_function(self, name: str) -> "Function":
        assert self.context == self.driver.context
        assert f".text.{name}\0".encode() in self.code
        return Function(self, name)


class Function:
    """``cupy.cuda.Function``: its handle is its own id."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name, self.ptr = module, name, id(self)


class Driver(ModuleType):
    """``cupy.cuda.driver`` in a thread that has no context yet.

    Attributes:
        context: the current one, 0 without.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__("cupy.cuda.driver")
        self.launchKernel = launch
        self.context = 0

    def ctxGetCurrent(self) -> int:
        return self.context

    def set_device(self, index: int) -> None:
        """Stand for ``cupy.cuda.runtime.setDevice``: each device has a context of its own."""
        self.context = 100 + index


def install(
    monkeypatch: pytest.MonkeyPatch, cuda_path: Path | None, launch: Callable[..., None]
) -> Any:
    """Make ``import cupy`` give this; return ``cupy.cuda``."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda = cuda
    cuda.nvrtc = Nvrtc()
    cuda.driver = Driver(launch)
    cuda.runtime = ModuleType("cupy.cuda.runtime")
    cuda.runtime.setDevice = cuda.driver.set_device
    cuda.Module = type("Module", (Module,), {"loaded": [], "driver": cuda.driver})
    cuda.get_cuda_path = lambda: cuda_path and str(cuda_path)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return cuda
