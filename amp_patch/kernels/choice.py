"""The fused operations by name, over lists of tensors; knows nothing of models or optimizers.

One pass over the gradients receives, unscales and checks them; what it found stays on the device
until asked. Lists on CUDA devices go to the kernels of csrc/, where cupy is there to launch them;
all others to the reference in torch.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cuda_kernels, cuda_module, scaler_state, torch_kernels
from .cuda_compiler import source
from .host_copy import HostCopy
from .scaler_state import Rule, ScalerState
from .torch_kernels import GradCheck, alike, multiply, values

__all__ = [
    "Cast",
    "Check",
    "Comparison",
    "CudaCheck",
    "GradCheck",
    "HostCopy",
    "ScalerState",
    "Unscale",
    "accumulate",
    "alike",
    "are_used",
    "clip_by_norm",
    "multiply",
    "source",
    "update_scale",
    "values",
]

#: What `Check` finds.
CudaCheck = cuda_kernels.GradCheck

_IS_CUDA = operator.attrgetter("is_cuda")


class Unscale:
    """See `torch_kernels.Unscale`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        made: Any = _chosen("Unscale", sources, targets).Unscale(sources, targets)
        self._run = made.run

    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        scale: float | Tensor,
        storage: Sequence[Tensor] = (),
    ) -> GradCheck:
        """See `torch_kernels.Unscale.run`."""
        check: GradCheck = self._run(sources, targets, scale, storage)
        return check


class Check:
    """See `cuda_kernels.Check`; where the reference serves there is none."""

    def __init__(self, sources: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        takes_cuda = _chosen("Unscale", sources, models) is cuda_kernels
        self._made = cuda_kernels.Check(sources, models) if takes_cuda else None

    def look(
        self,
        sources: Sequence[Tensor],
        models: Sequence[Tensor],
        in_place: Sequence[bool],
        scale: float | Tensor,
    ) -> CudaCheck | None:
        """See `cuda_kernels.Check.look`; always None where there is none."""
        return None if self._made is None else self._made.look(sources, models, in_place, scale)


class Cast:
    """See `torch_kernels.Cast`."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        made: Any = _chosen("Cast", sources, targets).Cast(sources, targets)
        self._run = made.run

    def run(self) -> None:
        """See `torch_kernels.Cast.run`."""
        self._run()


class Comparison:
    """See `torch_kernels.Comparison`."""

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        made: Any = _chosen("Comparison", sources, copies).Comparison(sources, copies)
        self._made: torch_kernels.Comparison = made

    def note_equal(self) -> None:
        """See `torch_kernels.Comparison.note_equal`."""
        self._made.note_equal()

    def forget(self) -> None:
        """See `torch_kernels.Comparison.forget`."""
        self._made.forget()

    def differs(self) -> bool:
        """See `torch_kernels.Comparison.differs`."""
        return self._made.differs()

    def reconcile(self, wins: Callable[[], Sequence[bool]]) -> bool:
        """See `torch_kernels.Comparison.reconcile` and `cuda_kernels.Comparison.reconcile`."""
        return self._made.reconcile(wins)


def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """See `torch_kernels.accumulate`."""
    _chosen("accumulate", targets, others).accumulate(targets, others)


def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """See `torch_kernels.clip_by_norm`."""
    total: Tensor = _chosen("clip_by_norm", grads).clip_by_norm(grads, max_norm, norm_type, norm)
    return total


def update_scale(state: ScalerState, found_inf: Tensor, rule: Rule) -> None:
    """See `scaler_state.update`."""
    if _chosen("update_scale", [state.buffer]) is cuda_kernels:
        cuda_kernels.update_scale(state, found_inf, rule)
    else:
        scaler_state.update(state, found_inf, rule)


def _chosen(operation: str, *columns: Sequence[Tensor]) -> Any:
    """Return the module that does an operation on tensors where these are.

    Raises:
        ValueError: ``AMP_PATCH_KERNELS`` has a value that it cannot have.
        RuntimeError: it forces cupy, which does not work.
    """
    if not _are_candidates(columns):
        return torch_kernels
    return cuda_kernels if are_used(cuda_kernels.SOURCES[operation], *columns) else torch_kernels


def are_used(sources: Sequence[str], *columns: Sequence[Tensor]) -> bool:
    """Return whether the kernels of CUDA sources work on tensors where these are.

    Raises:
        ValueError: ``AMP_PATCH_KERNELS`` has a value that it cannot have.
        RuntimeError: it forces cupy, which does not work.
    """
    if not _are_candidates(columns):
        return False
    devices = {tensor.device for column in columns for tensor in column}
    return all(_works(device, sources, _forced()) for device in devices)


def _are_candidates(columns: Sequence[Sequence[Tensor]]) -> bool:
    on_cuda = columns[0] and all(all(map(_IS_CUDA, one)) for one in columns)
    return _forced() != "torch" and bool(on_cuda)


def _forced() -> str:
    value = os.environ.get("AMP_PATCH_KERNELS", "")
    if value not in ("", "cupy", "torch"):
        raise ValueError(
            "AMP_PATCH_KERNELS must be 'cupy' or 'torch', or not set, which takes cupy where it "
            f"works; got {value!r}; call os.environ.pop('AMP_PATCH_KERNELS') or unset it in the "
            "shell."
        )
    if value == "cupy" and not _is_cuda_build():
        raise RuntimeError(
            "AMP_PATCH_KERNELS=cupy needs a build of torch for CUDA and a CUDA device; got torch "
            f"{torch.__version__} and {torch.cuda.device_count()} devices; call "
            "os.environ.pop('AMP_PATCH_KERNELS') or unset it in the shell."
        )
    return value


def _is_cuda_build() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


def _works(device: torch.device, sources: Sequence[str], forced: str) -> bool:
    # A build for ROCm calls its devices cuda, too.
    if not _is_cuda_build():
        return False
    modules = cuda_module.modules
    if modules.failure is None and modules.can_launch(sources, device):
        return True
    if forced == "cupy":
        raise RuntimeError(
            f"AMP_PATCH_KERNELS=cupy needs cupy, and CUDA's compiler and headers; got "
            f"{_words(modules.failure)}; {_mend()}, or unset AMP_PATCH_KERNELS."
        ) from modules.failure
    _warn_once(_words(modules.failure))
    return False


_warned: set[str] = set()


def _warn_once(words: str) -> None:
    if words in _warned:
        return
    _warned.add(words)
    warnings.warn(
        f"The CUDA kernels of amp_patch cannot be used, slower operations of torch take their "
        f"place: {words}. To use them, {_mend()}; to go on without this warning, set "
        "AMP_PATCH_KERNELS=torch.",
        stacklevel=2,
    )


def _words(failure: Exception | None) -> str:
    return f"{type(failure).__name__}: {failure}"


def _mend() -> str:
    major = str(torch.version.cuda).partition(".")[0]
    has_extra = major in ("12", "13")
    package = f"'amp_patch[cuda{major}]'" if has_extra else f"cupy-cuda{major}x"
    return f"call pip install {package}"
