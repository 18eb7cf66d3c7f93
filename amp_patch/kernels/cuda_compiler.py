"""Compiles the CUDA sources by NVRTC and keeps the machine code on disk; knows no kernel by name.

cupy's RawModule would do both, but with ``-ftz=true``, which cannot be taken back: numbers below
2**-126 would become 0 where torch keeps them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As tensor_table.cuh asks: without fused multiply-adds every operator rounds as written.
OPTIONS = ("--std=c++17", "--fmad=false")


def source(name: str) -> str:
    """Return the text of a CUDA source or header, ``source("cast.cu")``.

    A wheel holds the sources inside the package; a checkout (or an editable install of one)
    beside it.

    Raises:
        FileNotFoundError: no such source in either place.
    """
    return _path(name).read_text(encoding="utf-8")


def sources() -> list[str]:
    """Return the names of all CUDA sources, ``"cast.cu"`` and others."""
    return sorted(path.name for path in _path("cast.cu").parent.glob("*.cu"))


def toolchain() -> tuple[tuple[int, int], Path]:
    """Return NVRTC's version and the folder of CUDA's headers.

    Raises:
        ImportError, RuntimeError: as `machine_code`.
    """
    from cupy.cuda import nvrtc

    version: tuple[int, int] = nvrtc.getVersion()
    return version, _cuda_headers(version[0])


def _path(name: str) -> Path:
    package = Path(__file__).parent.parent  # amp_patch
    folders = (package / "csrc", package.parent / "csrc")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"a CUDA source must lie in one of {', '.join(map(str, folders))}; got {name!r}; "
        "install amp_patch from its wheel or from a complete checkout."
    )


def machine_code(name: str, architecture: str) -> bytes:
    """Return the cubin of a source; it is compiled where the cache on disk does not hold it.

    The cache is cupy's folder: ``$CUPY_CACHE_DIR``, or ``~/.cupy/kernel_cache``.

    Args:
        name: the source, ``"cast.cu"``.
        architecture: of the GPU, ``"sm_90"``.

    Raises:
        ImportError: cupy is missing.
        RuntimeError: NVRTC or CUDA's headers are missing, or NVRTC refuses the source; its
            report is in the message.
    """
    from cupy.cuda import nvrtc

    version = nvrtc.getVersion()
    headers = _cuda_headers(version[0])
    options = (f"--gpu-architecture={architecture}", *OPTIONS)
    kept = _cache_folder() / f"amp_patch-{_digest(name, options, version, headers)}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        folders = (f"-I{_path(name).parent}", f"-I{headers}")
        code = _compile(nvrtc, name, (*options, *folders))
    _write(kept, code)
    return code


def _compile(nvrtc: Any, name: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(source(name), name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code


def _digest(name: str, *others: object) -> str:
    digest = hashlib.sha256(repr((name, *others)).encode())
    path = _path(name)
    for file in (path, *sorted(path.parent.glob("*.cuh"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_folder() -> Path:
    default = os.path.join(os.path.expanduser("~"), ".cupy", "kernel_cache")
    return Path(os.environ.get("CUPY_CACHE_DIR", default))


def _write(path: Path, code: bytes) -> None:
    """Write a file that is complete or not there: several processes may compile at once."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(code)
        part.replace(path)
    except OSError:  # a home that cannot be written to: the next process compiles again
        with contextlib.suppress(OSError):
            part.unlink()


def _cuda_headers(major: int) -> Path:
    """Return the folder of cuda_fp16.h, of NVRTC's own version where there are several."""
    folders = sorted(_header_folders(), key=lambda folder: not _is_of(folder, major))
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise RuntimeError(
        f"CUDA's header cuda_fp16.h must be installed; got none in "
        f"{', '.join(map(str, folders)) or 'any folder'}; "
        f"call pip install nvidia-cuda-runtime{'-cu12' if major == 12 else f'=={major}.*'}."
    )


def _header_folders() -> Iterator[Path]:
    from cupy.cuda import get_cuda_path

    packages = importlib.util.find_spec("nvidia")
    for location in (packages and packages.submodule_search_locations) or ():
        yield from sorted(Path(location).glob("*/include"))
    roots = (get_cuda_path(), os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    yield from (Path(root) / "include" for root in roots if root)


def _is_of(folder: Path, major: int) -> bool:
    # The wheels of CUDA 12 have a folder per library, later ones a folder per version.
    return folder.parent.name == ("cuda_runtime" if major == 12 else f"cu{major}")
