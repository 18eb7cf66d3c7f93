"""What is to be said of an installation: a rule for each part, from plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from amp_patch.tools.options import LEVELS

from .finding import Finding
from .machine import OPTIONAL, Machine

_OLDEST_TORCH = (2, 6)


def judge(machine: Machine) -> list[Finding]:
    """Return what is to be said of a machine, from the most general to the most special."""
    return [finding for rule in RULES for finding in rule(machine)]


def _python_and_torch(machine: Machine) -> Iterator[Finding]:
    yield Finding("Python", "ok", f"Python {machine.python} on {machine.system}")
    build = f"CUDA {machine.cuda}" if machine.cuda else "the CPU"
    build = f"ROCm {machine.hip}" if machine.hip else build
    if _version(machine.torch) < _OLDEST_TORCH:
        text = f"torch {machine.torch}; amp_patch needs 2.6 or later"
        yield Finding("torch", "broken", text, "pip install --upgrade 'torch>=2.6'")
    else:
        yield Finding("torch", "ok", f"torch {machine.torch}, built for {build}")


def _gpus(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.gpus:
        memory = f"{gpu.memory / 2**30:.0f} GiB"
        where = f"{gpu.name}, {memory}, capability {gpu.capability[0]}.{gpu.capability[1]}"
        if gpu.capability < (7, 0) and not machine.hip:
            text = f"{where}: no tensor cores; half precision saves memory, not time"
            yield Finding("GPU", "note", text)
        else:
            yield Finding("GPU", "ok", where)
    if machine.gpus:
        return
    if machine.has_driver and not machine.cuda and not machine.hip:
        text = "there is an NVIDIA driver, but torch is built for the CPU and sees no GPU"
        mend = "pip install --force-reinstall torch (a build for CUDA: see PyTorch's 'Get started')"
        yield Finding("GPU", "broken", text, mend)
    elif machine.has_driver and machine.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        text = "CUDA_VISIBLE_DEVICES hides every GPU; all runs on the CPU"
        yield Finding("GPU", "note", text, "unset CUDA_VISIBLE_DEVICES")
    elif machine.has_driver:
        text = "there is an NVIDIA driver, but torch sees no GPU: the driver may be too old for it"
        yield Finding("GPU", "broken", text, "nvidia-smi (compare its CUDA version with torch's)")
    else:
        yield Finding("GPU", "note", "no GPU was found; everything runs on the CPU")


def _cupy(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus or machine.hip:
        yield from _cupy_without_gpu(machine)
        return
    major = str(machine.cuda).partition(".")[0]
    cupys = [name for name in machine.packages if name.startswith("cupy")]
    others = [one for one in cupys if (m := re.search(r"cuda(\d+)x", one)) and m[1] != major]
    install = f"pip install 'amp_patch[cuda{major}]'"
    if others:
        text = f"{others[0]} is installed, and torch is built for CUDA {machine.cuda}"
        yield Finding("cupy", "broken", text, f"pip uninstall -y {' '.join(others)} && {install}")
    elif not cupys:
        text = "cupy is not installed: torch's own functions do the work of the kernels, slower"
        yield Finding("cupy", "note", text, install)
    elif machine.toolchain is None:
        text = f"cupy cannot compile here: {machine.toolchain_error}"
        yield Finding("cupy", "broken", text, install)
    else:
        yield _toolchain(machine, cupys)


def _cupy_without_gpu(machine: Machine) -> Iterator[Finding]:
    cupys = [name for name in machine.packages if name.startswith("cupy")]
    if machine.toolchain is not None:
        yield _toolchain(machine, cupys)
    elif cupys:
        text = f"{cupys[0]} is not needed without an NVIDIA GPU ({machine.toolchain_error})"
        yield Finding("cupy", "note", text)
    else:
        yield Finding("cupy", "ok", "cupy is not installed, nor needed without an NVIDIA GPU")


def _toolchain(machine: Machine, cupys: list[str]) -> Finding:
    versions = [f"{name} {machine.packages[name]}" for name in cupys]
    nvrtc = ".".join(map(str, machine.toolchain[0])) if machine.toolchain else "none"
    return Finding("cupy", "ok", ", ".join([*versions, f"NVRTC {nvrtc}", "CUDA's headers"]))


def _cudnn(machine: Machine) -> Iterator[Finding]:
    if machine.gpus and not machine.cudnn:
        text = "cuDNN is switched off or missing: convolutions and RNNs are slow"
        yield Finding(
            "cudnn",
            "note",
            text,
            "python -c 'import torch.backends.cudnn as c; print(c.version(), c.enabled)'",
        )


def _kernels_setting(machine: Machine) -> Iterator[Finding]:
    value = machine.environ.get("AMP_PATCH_KERNELS", "")
    unset = "unset AMP_PATCH_KERNELS"
    if value == "torch":
        text = "AMP_PATCH_KERNELS=torch: the CUDA kernels are switched off"
        yield Finding("environment", "note", text, unset)
    elif value == "cupy" and not machine.gpus:
        text = "AMP_PATCH_KERNELS=cupy makes it an error that the CUDA kernels cannot be used here"
        yield Finding("environment", "broken", text, unset)
    elif value not in ("", "cupy"):
        text = f"AMP_PATCH_KERNELS must be 'cupy' or 'torch'; it is {value!r}"
        yield Finding("environment", "broken", text, unset)


def _level_setting(machine: Machine) -> Iterator[Finding]:
    level = machine.environ.get("AMP_PATCH_OPT_LEVEL", "")
    unset = "unset AMP_PATCH_OPT_LEVEL"
    if level in LEVELS:
        text = f"AMP_PATCH_OPT_LEVEL={level}: every script trains at it, whatever it asks for"
        yield Finding("environment", "note", text, unset)
    elif level:
        text = f"AMP_PATCH_OPT_LEVEL must be a level, O0 to O5; it is {level!r}"
        yield Finding("environment", "broken", text, unset)


def _apex(machine: Machine) -> Iterator[Finding]:
    if machine.apex is not None and machine.apex_has_amp:
        text = f"a real apex with apex.amp lies in {machine.apex}; amp-patch run leaves it in place"
        yield Finding("apex", "note", text, "amp-patch run --force SCRIPT (or pip uninstall apex)")
    elif machine.apex is not None and not machine.apex_is_nvidias:
        text = f"{machine.apex} is not NVIDIA's apex, but another package of this name"
        yield Finding("apex", "note", text, "pip uninstall apex")
    elif machine.apex is not None:
        text = f"a real apex lies in {machine.apex}, without apex.amp, which amp_patch supplies"
        yield Finding("apex", "ok", text)


def _enabled(machine: Machine) -> Iterator[Finding]:
    if machine.enabled is None:
        text = "amp-patch enable is off: apex can be imported under amp-patch run only"
        yield Finding("enable", "ok", text)
    elif machine.is_enabled_whole:
        text = f"amp-patch enable is on, in {machine.enabled}: every process can import apex"
        yield Finding("enable", "ok", text)
    else:
        text = f"amp-patch enable is on, in {machine.enabled}, by another amp_patch or not in full"
        yield Finding("enable", "note", text, "amp-patch enable (renews it)")


def _extras(machine: Machine) -> Iterator[Finding]:
    missing = [name for name in OPTIONAL if name not in machine.packages]
    there = [f"{name} {machine.packages[name]}" for name in OPTIONAL if name in machine.packages]
    yield Finding("extras", "ok", f"optional packages: {', '.join(there) or 'none'}")
    if missing:
        text = f"optional and not installed: {', '.join(missing)}"
        yield Finding("extras", "note", text, f"pip install {' '.join(missing)}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


#: In the order in which they are told.
RULES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python_and_torch,
    _gpus,
    _cudnn,
    _cupy,
    _kernels_setting,
    _level_setting,
    _apex,
    _enabled,
    _extras,
)
