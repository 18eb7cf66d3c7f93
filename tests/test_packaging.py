"""What an installation holds: the CUDA sources from a wheel, an editable install, a checkout."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import processes
import pytest

import amp_patch
from amp_patch import kernels

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "LICENSE", "CONTRIBUTING.md")
BESIDE = ("csrc", "docs", "examples", "tests")
SOURCES = sorted(path.name for path in ROOT.glob("csrc/*.cu*"))
# run from elsewhere, with nothing of this checkout on the path unless the test puts it there
PRINT_SOURCES = f"""
import amp_patch
from amp_patch import kernels
print(amp_patch.__file__)
for name in {SOURCES!r}:
    print(name, len(kernels.source(name)))
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def printed_sources(printed: str) -> tuple[Path, dict[str, int]]:
    """Return the package's file and the length of each source."""
    file, *lines = printed.splitlines()
    return Path(file), {line.split()[0]: int(line.split()[1]) for line in lines}


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **more}


def sources_seen(folder: Path, place: Path) -> tuple[Path, dict[str, int]]:
    """Import the package from a folder, in a process of its own."""
    command = [sys.executable, "-c", PRINT_SOURCES]
    run = processes.run(command, cwd=folder, env=environment(PYTHONPATH=str(place)))
    assert run.returncode == 0, run.stderr
    return printed_sources(run.stdout)


def lengths() -> dict[str, int]:
    return {name: len((ROOT / "csrc" / name).read_text(encoding="utf-8")) for name in SOURCES}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what is needed to build, so that building leaves nothing in the real checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", *TEXTS):
        shutil.copy(ROOT / name, folder)
    for name in ("amp_patch", *BESIDE):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    left_by_another_build = folder / "build" / "lib" / "amp_patch" / "deleted_since.py"
    left_by_another_build.parent.mkdir(parents=True)
    left_by_another_build.touch()
    return folder


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, checkout)
    return next(folder.glob("*.whl"))


def test_there_are_sources() -> None:
    assert "cast.cu" in SOURCES


def test_sources_are_found_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    pip("install", "--no-deps", "--target", installed, wheel)
    file, seen = sources_seen(tmp_path, installed)
    assert file.is_relative_to(installed)
    assert seen == lengths()


@pytest.mark.slow(instead="a wheel, which is built into another folder")
@pytest.mark.parametrize("build_lib", [".", "..", "elsewhere"])
def test_a_build_into_a_folder_that_is_named_removes_nothing(
    checkout: Path, tmp_path: Path, build_lib: str
) -> None:
    folder = shutil.copytree(checkout, tmp_path / "amp_patch")  # as a clone is called
    own = folder / build_lib / "amp_patch" / "notes.txt"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.touch()
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", build_lib]
    run = processes.run(command, cwd=folder, env=environment())
    assert run.returncode == 0, run.stderr
    assert own.is_file()
    assert (folder / "amp_patch" / "session.py").is_file()


@pytest.mark.slow(instead="sources of a wheel")
def test_sources_are_found_from_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    pip("install", "--no-deps", "--no-build-isolation", "--target", installed, "-e", checkout)
    # an editable install works through a .pth file, which acts in a site directory only
    setup = f"import site\nsite.addsitedir({str(installed)!r})\nsite.main()"
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"{setup}\n{PRINT_SOURCES}"],
        cwd=tmp_path,
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    file, seen = printed_sources(run.stdout)
    assert file.is_relative_to(checkout)
    assert seen == lengths()


def test_sources_are_found_from_a_bare_checkout(checkout: Path, tmp_path: Path) -> None:
    file, seen = sources_seen(tmp_path, checkout)
    assert file.is_relative_to(checkout)
    assert seen == lengths()


def test_a_source_that_is_nowhere_is_named() -> None:
    message = r"a CUDA source must lie in one of .*csrc, .*csrc; got 'no\.cu'; install amp_patch"
    with pytest.raises(FileNotFoundError, match=message):
        kernels.source("no.cu")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("amp_patch/**/*.py")}
    sources = {f"amp_patch/csrc/{name}" for name in SOURCES}
    data = {"amp_patch/py.typed", "amp_patch/tools/sweep/report.template.html"}
    assert inside == modules | sources | data


def test_the_source_distribution_holds_what_its_tests_run_on(
    checkout: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path]
    run = processes.run(list(map(str, command)), cwd=checkout, env=environment())
    assert run.returncode == 0, run.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [path for name in BESIDE for path in (checkout / name).rglob("*") if path.is_file()]
    assert names.issuperset({*TEXTS, *(str(path.relative_to(checkout)) for path in files)})


def metadata(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
    return archive.read(name).decode()


def test_the_metadata_states_version_requirements_and_extras(wheel: Path) -> None:
    text = metadata(wheel)
    assert f"\nVersion: {amp_patch.__version__}\n" in text
    assert re.search(r"^Requires-Python: >=3\.10$", text, re.MULTILINE)
    required = set(re.findall(r"^Requires-Dist: ([^;\n]+)$", text, re.MULTILINE))
    assert required == {"click>=8.1", "torch>=2.6", "wrapt>=1.16"}
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
    assert extras == {"cuda12", "cuda13", "docs", "examples", "graphs", "sweep", "test"}


def test_the_description_links_to_no_file_that_an_index_of_packages_lacks(wheel: Path) -> None:
    description = metadata(wheel)
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert [link for link in links if not link.startswith(("https:", "#"))] == []
    assert "https://github.com/NVIDIA/apex" in links
    assert "Pick a level (`docs/pick-a-level.md`) says" in description


@pytest.mark.parametrize("major", [12, 13])
def test_each_cuda_extra_brings_cupy_its_compiler_and_the_headers(wheel: Path, major: int) -> None:
    brought = re.findall(
        rf"^Requires-Dist: ([\w-]+).*; extra == ['\"]cuda{major}['\"]$",
        metadata(wheel),
        re.MULTILINE,
    )
    suffix = "-cu12" if major == 12 else ""
    assert set(brought) == {
        f"cupy-cuda{major}x",
        f"nvidia-cuda-nvrtc{suffix}",
        f"nvidia-cuda-runtime{suffix}",
    }


@pytest.mark.slow(instead="sources of a wheel, compiled for sm_75 by NVRTC")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize("source", [name for name in SOURCES if name.endswith(".cu")])
def test_each_source_compiles_alone(source: str, tmp_path: Path) -> None:
    command = ["nvcc", "--std=c++17", "-Icsrc", "-cubin", "-arch=sm_80", "-Werror=all-warnings"]
    run = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin", f"csrc/{source}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "kernel.cubin").stat().st_size > 0
