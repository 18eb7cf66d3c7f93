"""Package metadata; the settings of the tools are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent

EXTRAS = {
    # cupy compiles csrc/ when a kernel is first used: NVRTC is the compiler, and the runtime
    # package holds the headers cuda_fp16.h and cuda_bf16.h.
    "cuda12": ["cupy-cuda12x>=14", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"],
    "cuda13": ["cupy-cuda13x>=14", "nvidia-cuda-nvrtc==13.*", "nvidia-cuda-runtime==13.*"],
    # what `amp-patch sweep` draws with, and what hands it the functions of `amp_patch.sweep`
    "sweep": ["cloudpickle>=3", "matplotlib>=3.8", "plotly>=6", "rich>=13"],
}
# the libraries of graph networks that amp_patch has rules for, at the versions that they are tested
# at; DGL has no later wheel for the CPU that runs without a C++ library of one version of torch
EXTRAS["graphs"] = [
    "dgl==1.1.3; sys_platform == 'linux' and python_version < '3.12'",
    "torch_geometric>=2.6",
]
# the site, `sphinx-build -W docs build/docs`; without NumPy torch warns when it is imported
EXTRAS["docs"] = ["furo>=2024.8", "myst-parser>=4", "numpy>=1.26", "sphinx>=8"]
EXTRAS["examples"] = [*EXTRAS["sweep"], "scikit-learn>=1.4"]
EXTRAS["test"] = [
    *EXTRAS["docs"],
    *EXTRAS["examples"],
    *EXTRAS["graphs"],
    "expecttest>=0.2",
    "hypothesis>=6.100",
    "mypy>=1.15",
    # the same compiler and headers as cuda13's; they need no GPU
    "nvidia-cuda-nvrtc==13.*; sys_platform == 'linux'",
    "nvidia-cuda-runtime==13.*; sys_platform == 'linux'",
    "pytest>=9",
    "pytest-randomly>=3.15",
    "pytest-xdist>=3.5",
    # drives the Chromium of the system, which the tests of reports open
    "playwright>=1.45",
    "ruff>=0.9",
    "setuptools>=70.1",
    "tensorboard>=2.14",
]


def version() -> str:
    """Return ``__version__`` of the package without importing it."""
    text = (ROOT / "amp_patch" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('amp_patch/__init__.py must have a line __version__ = "..."')
    return match.group(1)


def long_description() -> str:
    """Return README.md with the names of the files in the place of links to them.

    An index of packages shows it beside no other file of the repository: a relative link would lead
    nowhere there. A picture is left out but for what it shows, in words.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)[^)]*\)", r"*\1*", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)#]*)(#[^)]*)?\)", r"\1 (`\2`)", text)


class BuildAnew(build_py):
    """Builds into an empty folder: what a build of before had, and is deleted since, stays out.

    A folder that the caller names, by ``--build-lib``, may hold more, and nothing is removed there.
    """

    def run(self) -> None:
        """Run the command, as setuptools does."""
        built = Path(self.build_lib, "amp_patch").resolve()
        if not self.editable_mode and built.is_relative_to((ROOT / "build").resolve()):
            shutil.rmtree(built, ignore_errors=True)
        super().run()


setup(
    name="amp_patch",
    version=version(),
    description="Mixed precision training for PyTorch by one line of code, levels O0 to O5",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    install_requires=[
        "click>=8.1",
        "tomli>=2; python_version < '3.11'",
        "torch>=2.6",
        "wrapt>=1.16",
    ],
    cmdclass={"build_py": BuildAnew},
    entry_points={"console_scripts": ["amp-patch=amp_patch.tools.command_line:main"]},
    extras_require=EXTRAS,
    # csrc/ stands at the top of the repository and inside the package once installed
    packages=[*find_packages(include=["amp_patch", "amp_patch.*"]), "amp_patch.csrc"],
    package_dir={"amp_patch.csrc": "csrc"},
    package_data={
        # what Python runs when it starts lies in folders that are no packages
        "amp_patch": [
            "py.typed",
            "apex/enabled/amp_patch_apex.py",
            "apex/startup/sitecustomize.py",
            "tools/sweep/report.template.html",
        ],
        "amp_patch.csrc": ["*.cu", "*.cuh"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
