"""Compiling by NVRTC (the real one), the cache on disk, and where sources and headers are found."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import fake_cupy
import pytest
from cuda_on_cpu.kernel_names import KERNELS

from amp_patch import kernels
from amp_patch.kernels import cuda_compiler
from amp_patch.kernels.cuda_compiler import machine_code

CSRC = Path(__file__).parents[2] / "csrc"
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="the extra 'test' brings NVRTC for Linux only"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch, None, print)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a copy of what a wheel holds, whose sources a test may change."""
    folder = tmp_path / "site" / "amp_patch"
    shutil.copytree(CSRC, folder / "csrc")
    monkeypatch.setattr(cuda_compiler, "__file__", str(folder / "kernels" / "cuda_compiler.py"))
    return folder


@linux_only
def test_a_source_is_compiled_to_all_of_its_kernels(cuda: Any, cache: Path) -> None:
    code = machine_code("cast.cu", "sm_90")
    assert all(f".text.{name}\0".encode() in code for name in KERNELS["cast.cu"])
    ((architecture, *options),) = cuda.nvrtc.options
    assert architecture == "--gpu-architecture=sm_90"
    # what the other tests compile with; flushing to zero is off unless asked for
    assert options[:2] == ["--std=c++17", "--fmad=false"]
    assert options[2] == f"-I{CSRC}"
    assert (Path(options[3][2:]) / "cuda_fp16.h").is_file()
    assert len(options) == 4
    assert cuda.nvrtc.alive == 0


@linux_only
def test_a_source_includes_the_headers_beside_it(cuda: Any, cache: Path, package: Path) -> None:
    machine_code("reconcile.cu", "sm_90")
    assert f"-I{package / 'csrc'}" in cuda.nvrtc.options[0]
    (package / "csrc" / "sweep.cuh").write_text("#error the one beside it", encoding="utf-8")
    with pytest.raises(RuntimeError, match="the one beside it"):
        machine_code("reconcile.cu", "sm_90")


@linux_only
def test_the_second_time_it_comes_from_the_disk(cuda: Any, cache: Path) -> None:
    first = machine_code("update_scale.cu", "sm_90")
    (file,) = cache.iterdir()
    assert re.fullmatch(r"amp_patch-[0-9a-f]{64}\.cubin", file.name)
    file.write_bytes(first + b"from the disk")
    assert machine_code("update_scale.cu", "sm_90") == first + b"from the disk"
    assert len(cuda.nvrtc.options) == 1


@linux_only
@pytest.mark.parametrize("changed", ["update_scale.cu", "sweep.cuh", "version", "architecture"])
def test_what_may_change_the_code_compiles_again(
    cuda: Any, cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    machine_code("update_scale.cu", "sm_90")
    if changed == "version":
        monkeypatch.setattr(cuda.nvrtc, "getVersion", lambda: (13, 99))
    elif changed != "architecture":
        with (package / "csrc" / changed).open("a", encoding="utf-8") as file:
            file.write("// changed\n")
    machine_code("update_scale.cu", "sm_80" if changed == "architecture" else "sm_90")
    assert len(cuda.nvrtc.options) == len(list(cache.iterdir())) == 2


@linux_only
def test_what_cannot_be_written_is_compiled_each_time(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert machine_code("update_scale.cu", "sm_90") == machine_code("update_scale.cu", "sm_90")
    assert len(cuda.nvrtc.options) == 2


@linux_only
def test_nothing_is_left_of_a_file_that_could_not_take_its_place(
    cuda: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(f"{target} is on a share that locks files")

    monkeypatch.setattr(Path, "replace", refuse)
    machine_code("update_scale.cu", "sm_90")
    assert list(cache.iterdir()) == []


@linux_only
def test_other_users_of_one_cache_read_what_is_kept(cuda: Any, cache: Path) -> None:
    before = os.umask(0o022)
    try:
        machine_code("update_scale.cu", "sm_90")
    finally:
        os.umask(before)
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644


def test_the_default_cache_is_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    home = Path(os.path.expanduser("~"))
    assert cuda_compiler._cache_folder() == home / ".cupy" / "kernel_cache"


@linux_only
def test_a_source_that_nvrtc_refuses_is_reported_in_its_words(
    cuda: Any, cache: Path, package: Path
) -> None:
    (package / "csrc" / "broken.cu").write_text("void kernel() { nothing; }", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r'NVRTC: (.|\n)*broken.cu\(1\).*"nothing" is undefined'):
        machine_code("broken.cu", "sm_90")
    assert cuda.nvrtc.alive == 0
    assert not cache.exists()


# --- where CUDA's headers are ---


def nvidia_packages(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name / "include").mkdir(parents=True)
        (folder / name / "include" / "cuda_fp16.h").touch()

    class Spec:
        submodule_search_locations = (str(folder),)

    monkeypatch.setattr(cuda_compiler.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)


@linux_only
@pytest.mark.parametrize(
    ("installed", "major", "found"),
    [
        (["cuda_runtime"], 12, "cuda_runtime"),
        (["cu13"], 13, "cu13"),
        (["cu13", "cuda_runtime"], 12, "cuda_runtime"),
        (["cu13", "cu14", "cuda_runtime"], 14, "cu14"),
        (["cu13"], 12, "cu13"),
    ],
)
def test_headers_of_the_compilers_version_come_first(
    cuda: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: list[str],
    major: int,
    found: str,
) -> None:
    nvidia_packages(monkeypatch, tmp_path, *installed)
    assert cuda_compiler._cuda_headers(major) == tmp_path / found / "include"


@linux_only
@pytest.mark.parametrize("place", ["cupy", "CUDA_HOME", "CUDA_PATH"])
def test_headers_of_a_toolkit_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    nvidia_packages(monkeypatch, tmp_path / "none")
    toolkit = tmp_path / "toolkit"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_fp16.h").touch()
    fake_cupy.install(monkeypatch, toolkit if place == "cupy" else None, print)
    if place != "cupy":
        monkeypatch.setenv(place, str(toolkit))
    assert cuda_compiler._cuda_headers(13) == toolkit / "include"


@linux_only
@pytest.mark.parametrize(
    ("major", "package"), [(12, "nvidia-cuda-runtime-cu12"), (13, "nvidia-cuda-runtime==13.*")]
)
def test_missing_headers_are_said(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int, package: str
) -> None:
    nvidia_packages(monkeypatch, tmp_path / "none")
    message = re.escape(
        "CUDA's header cuda_fp16.h must be installed; got none in any folder; "
        f"call pip install {package}."
    )
    with pytest.raises(RuntimeError, match=message):
        cuda_compiler._cuda_headers(major)


# --- source ---


def test_source_is_the_text_of_the_file() -> None:
    assert kernels.source("cast.cu") == (CSRC / "cast.cu").read_text(encoding="utf-8")
    assert "__global__" in kernels.source("cast.cu")


def test_source_prefers_what_a_wheel_holds(package: Path) -> None:
    (package / "csrc" / "cast.cu").write_text("// from the wheel", encoding="utf-8")
    assert kernels.source("cast.cu") == "// from the wheel"


def test_a_missing_source_is_said() -> None:
    message = (
        "a CUDA source must lie in one of .*amp_patch/csrc, .*csrc; got 'no.cu'; "
        + re.escape("install amp_patch from its wheel or from a complete checkout.")
    )
    with pytest.raises(FileNotFoundError, match=message):
        kernels.source("no.cu")
