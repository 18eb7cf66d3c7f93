"""What there is on this machine, as plain data; judges nothing.

What it means is said in `installation`, which tests can ask about machines that they make up.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from amp_patch.apex import environment
from amp_patch.apex.process import real_amp
from amp_patch.apex.real_apex import is_nvidias
from amp_patch.kernels import cuda_compiler

#: Packages that only some commands and arguments need.
OPTIONAL = ("rich", "matplotlib", "plotly", "tensorboard", "wandb")
_CUDA_PACKAGES = ("cupy", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


@dataclass(frozen=True)
class Gpu:
    """A device that torch can use.

    Attributes:
        name: of its maker.
        capability: (8, 0) of an A100.
        memory: bytes.
    """

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Machine:
    """A machine with its Python environment.

    Attributes:
        cuda, hip: the version that torch is built for; None where it is not.
        gpus: that torch sees.
        has_driver: whether there is an NVIDIA driver or device, whatever torch sees.
        packages: name -> version of the distributions that have to do with CUDA or are optional.
        toolchain: NVRTC's version and the folder of CUDA's headers; None where `toolchain_error`.
        toolchain_error: the exception's name and message.
        apex: where a real apex lies; None without.
        apex_has_amp: whether that has an ``apex.amp`` of its own.
        apex_is_nvidias: whether it is NVIDIA's, and not what PyPI has under this name.
        enabled: the folder by which every process imports apex from amp_patch; None without.
        is_enabled_whole: whether that is as this amp_patch writes it.
        environ: the environment variables.
        cudnn: whether torch uses cuDNN.
    """

    python: str = "3.11.0"
    system: str = "Linux x86_64"
    torch: str = "2.13.0"
    cuda: str | None = None
    hip: str | None = None
    gpus: tuple[Gpu, ...] = ()
    has_driver: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    toolchain: tuple[tuple[int, int], Path] | None = None
    toolchain_error: str = ""
    apex: str | None = None
    apex_has_amp: bool = False
    apex_is_nvidias: bool = True
    enabled: Path | None = None
    is_enabled_whole: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    cudnn: bool = True


def look() -> Machine:
    """Return what there is here."""
    toolchain, error = None, ""
    try:
        toolchain = cuda_compiler.toolchain()
    except Exception as problem:  # whatever a broken cupy raises when it is imported
        error = f"{type(problem).__name__}: {problem}"
    spec = importlib.machinery.PathFinder.find_spec("apex")
    enabled = environment.enabled_folder()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        gpus=_gpus(),
        has_driver=_has_driver(),
        packages=_packages(),
        toolchain=toolchain,
        toolchain_error=error,
        apex=None if spec is None or spec.loader is None else str(spec.origin),
        apex_has_amp=real_amp() is not None,
        apex_is_nvidias=spec is None or is_nvidias(spec.submodule_search_locations or ()),
        enabled=enabled,
        is_enabled_whole=enabled is None or environment.look(enabled).is_whole,
        environ=dict(os.environ),
        cudnn=torch.backends.cudnn.enabled and torch.backends.cudnn.is_available(),
    )


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(one.name, (one.major, one.minor), one.total_memory) for one in properties)


def _has_driver() -> bool:
    places = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/dxg")
    return shutil.which("nvidia-smi") is not None or any(Path(one).exists() for one in places)


def _packages() -> dict[str, str]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(_CUDA_PACKAGES) or name in OPTIONAL:
            found[name] = distribution.version
    return dict(sorted(found.items()))
