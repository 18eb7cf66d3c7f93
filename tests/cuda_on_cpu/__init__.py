"""Compiles the text of the CUDA kernels for the CPU and launches them; knows only their names.

What is emulated, and what is reported as an error, stands in cuda_on_cpu.h.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from filelock import FileLock
from torch import Tensor

from cuda_on_cpu.kernel_names import KERNELS

FOLDER = Path(__file__).parent
CSRC = FOLDER.parent.parent / "csrc"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror", f"-I{FOLDER}", f"-I{CSRC}"),
    # threads are switched by longjmp, which a fortified library takes for an error
    "-U_FORTIFY_SOURCE",
    # every access is checked; its report goes to the handler in cuda_on_cpu.h
    *("-fsanitize=alignment,null", "-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc"),
)
CTYPES = {
    "P": ctypes.c_void_p,
    "i": ctypes.c_int,
    "q": ctypes.c_longlong,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
COMPILER = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)

Argument = Tensor | int | float | None


class LaunchError(Exception):
    """What the emulation reports of a launch, as cuda_on_cpu.h lists it."""


class Kernels:
    """The kernels of one source, compiled for the CPU."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def launch(
        self, name: str, grid: int, *arguments: Argument, seed: int = 0, threads: int | None = None
    ) -> None:
        """Run a kernel with the GPU's launch shape.

        Args:
            name: the kernel.
            grid: number of blocks.
            arguments: a tensor goes as its address, None as the null address.
            seed: of the order in which blocks and threads run.
            threads: in a block, whole warps; THREADS unless given.

        Raises:
            LaunchError: the kernel did what a GPU does not allow.
        """
        letters = self._function("parameters", name)().decode()
        assert len(letters) == len(arguments), f"{name} takes {letters}"
        values = [
            CTYPES[letter](argument.data_ptr() if isinstance(argument, Tensor) else argument)
            for letter, argument in zip(letters, arguments, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        seed = ctypes.c_uint64(seed).value
        launch = self._function("launch", name)
        if error := launch(grid, threads or THREADS, ctypes.c_uint64(seed), addresses).decode():
            raise LaunchError(f"{name}: {error}")

    @functools.cache  # noqa: B019 - it lives as long as the process
    def _function(self, kind: str, name: str) -> ctypes._CFuncPtr:
        function = self._library[f"{kind}_{name}"]
        function.restype = ctypes.c_char_p
        return function


def require_compiler() -> None:
    """Skip the test, with the reason, where nothing can be compiled."""
    if COMPILER is None:
        pytest.skip("no C++ compiler on the PATH: g++, c++ or clang++")


def compiled(source: str, config: pytest.Config) -> Kernels:
    """Compile ``csrc/<source>`` and give its kernels; skip the test where no compiler is."""
    return compiled_text(Path(source).stem, f'#include "{source}"', KERNELS[source], config)


def compiled_text(name: str, text: str, kernels: Iterable[str], config: pytest.Config) -> Kernels:
    """As `compiled`, of any text.

    The library is kept in the folder "build", under a digest of all that it is made of: whoever
    needs it first compiles it, for all tests of all processes.
    """
    require_compiler()
    lines = ['#include "cuda_on_cpu.h"', text, *map("EMULATE({})".format, kernels)]
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode() + repr((COMPILER, FLAGS)).encode())
    for path in sorted((*CSRC.iterdir(), *FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    folder = config.rootpath / "build" / "cuda_on_cpu"
    return load(folder / f"{name}-{digest.hexdigest()[:16]}.so", text)


@functools.cache
def load(library: Path, text: str) -> Kernels:
    """Compile a library unless it is there, or another process is about to make it; load it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            _compile(library, text)
    return Kernels(library)


def _compile(library: Path, text: str) -> None:
    # if this process is killed, no other one may find half a library
    unfinished = library.with_suffix(".tmp")
    run = subprocess.run(
        [str(COMPILER), "-x", "c++", "-", "-o", str(unfinished), *FLAGS],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    unfinished.replace(library)


def constant(name: str) -> int:
    """Return an integer that tensor_table.cuh defines."""
    text = (CSRC / "tensor_table.cuh").read_text(encoding="utf-8")
    match = re.search(rf"^constexpr int {name} = (\d+);$", text, re.MULTILINE)
    assert match, name
    return int(match[1])


CHUNK, THREADS = constant("CHUNK"), constant("THREADS")
