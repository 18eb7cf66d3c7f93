"""Chooses who does an operation on lists of tensors; knows nothing of models or optimizers.

The kernels of csrc/ do it where all tensors are on CUDA devices and cupy can launch kernels there,
else functions of torch. Both have the same names and signatures, in `cuda_kernels` and in
`torch_kernels`, which say what each operation does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.common.warn_once import warn_once

from . import cuda_cross_entropy, cuda_kernels, cuda_module, scaler_state, torch_kernels
from .dense_rows import forget_splits
from .getters import IS_CUDA
from .scaler_state import Rule, ScalerState

_NUMBER = Tensor.get_device


def unscaler(
    sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> torch_kernels.Unscale | cuda_kernels.Unscale:
    """Return what unscales and checks gradients; see `torch_kernels.Unscale`."""
    if _is_for_kernels("Unscale", sources, targets):
        return cuda_kernels.Unscale(sources, targets)
    return torch_kernels.Unscale(sources, targets)


def unscale(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float | Tensor
) -> torch_kernels.GradCheck:
    """Unscale and check gradients that may be others at each call; see `torch_kernels.unscale`."""
    if _is_for_kernels("Unscale", sources, targets):
        return cuda_kernels.unscale(sources, targets, scale)
    return torch_kernels.unscale(sources, targets, scale)


#: What `checker` returns.
Checker = torch_kernels.Check | cuda_kernels.Check


def checker(sources: Sequence[Tensor], models: Sequence[Tensor]) -> Checker:
    """Return what checks gradients without unscaling them; see `cuda_kernels.Check`.

    Torch has no function for that: what stands for it checks nothing, and says so.
    """
    if _is_for_kernels("Check", sources, models):
        return cuda_kernels.Check(sources, models)
    return torch_kernels.Check(sources, models)


def caster(
    sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> torch_kernels.Cast | cuda_kernels.Cast:
    """Return what copies tensors into those of another dtype; see `torch_kernels.Cast`."""
    if _is_for_kernels("Cast", sources, targets):
        return cuda_kernels.Cast(sources, targets)
    return torch_kernels.Cast(sources, targets)


def comparison(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> torch_kernels.Comparison:
    """Return what compares tensors with their copies; see `torch_kernels.Comparison`."""
    if _is_for_kernels("Comparison", sources, copies):
        return cuda_kernels.Comparison(sources, copies)
    return torch_kernels.Comparison(sources, copies)


def accumulate(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add tensors to others; see `torch_kernels.accumulate`."""
    # on a CPU the wish of the environment would take as long as to add
    if are_on_cuda(targets) and _is_for_kernels("accumulate", targets, others):
        cuda_kernels.accumulate(targets, others)
    else:
        torch_kernels.accumulate(targets, others)


def clip_by_norm(
    grads: Sequence[Tensor], max_norm: float, norm_type: float, norm: Tensor | None = None
) -> Tensor:
    """Clip gradients by their total norm and return it; see `torch_kernels.clip_by_norm`."""
    if _is_for_kernels("clip_by_norm", grads):
        return cuda_kernels.clip_by_norm(grads, max_norm, norm_type, norm)
    return torch_kernels.clip_by_norm(grads, max_norm, norm_type, norm)


def update_scale(state: ScalerState, found_inf: Tensor, rule: Rule) -> None:
    """Move a scale on its device; see `scaler_state.update`."""
    if _is_for_kernels("update_scale", [state.buffer]):
        cuda_kernels.update_scale(state, found_inf, rule)
    else:
        scaler_state.update(state, found_inf, rule)


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: str
) -> Tensor | None:
    """Return torch's cross-entropy in float32, see `cuda_cross_entropy`; None: torch is to do it.

    Args:
        logits: in the dtype that they have, which is that of their gradient.
        targets: the class of each row, or what torch takes else.
        ignore_index, reduction: as torch's function takes them.
    """
    if reduction not in cuda_cross_entropy.REDUCTIONS:
        return None
    if not cuda_cross_entropy.takes(logits, targets):
        return None
    if not are_used(cuda_cross_entropy.SOURCES, [logits]):
        return None
    return cuda_cross_entropy.cross_entropy(logits, targets, ignore_index, reduction)


def _is_for_kernels(operation: str, *columns: Sequence[Tensor]) -> bool:
    return are_used(cuda_kernels.SOURCES[operation], *columns)


def are_used(sources: Sequence[str], *columns: Sequence[Tensor]) -> bool:
    """Return whether kernels do an operation on these tensors.

    Args:
        sources: the CUDA sources whose kernels it launches, ``("cast.cu",)``.
        columns: all tensors that it reads or writes; an empty first list is nothing for kernels.

    Raises:
        ValueError: ``AMP_PATCH_KERNELS`` has a value that it cannot have.
        RuntimeError: it forces cupy, which does not work.
    """
    forced = _forced()
    if forced == "torch" or not columns[0] or not all(map(are_on_cuda, columns)):
        return False
    # To compare numbers takes less time than to compare devices.
    numbers = [list(map(_NUMBER, column)) for column in columns]
    firsts = {
        number: column[own.index(number)]
        for column, own in zip(columns, numbers, strict=True)
        for number in set(own)
    }
    return all(_works(one.device, sources, forced) for one in firsts.values())


def is_on_cuda(value: object) -> bool:
    """Return whether a value is a tensor, and where kernels may take it."""
    return isinstance(value, Tensor) and bool(IS_CUDA(value))


def are_on_cuda(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are where kernels may take them; asks for no wish of the user."""
    return all(map(IS_CUDA, tensors))


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
    if torch.version.cuda is None:
        return False
    # Where a tensor is on a device CUDA has begun; to look for devices takes the host longer.
    return torch.cuda.is_initialized() or torch.cuda.is_available()


def _works(device: torch.device, sources: Sequence[str], forced: str) -> bool:
    # A build for ROCm calls its devices cuda, too.
    if not _is_cuda_build():
        return False
    failure = cuda_module.modules.failure(sources, device)
    if failure is None:
        return True
    reason = f"{type(failure.error).__name__}: {failure.error}"
    if forced == "cupy":
        raise RuntimeError(_refusal(failure.source, reason)) from failure.error
    warn_once(_warning(failure.source, reason))
    return False


def _refusal(source: str | None, reason: str) -> str:
    if source is None:
        return (
            f"AMP_PATCH_KERNELS=cupy needs cupy, and CUDA's compiler and headers; got {reason}; "
            f"{_mend()}, or unset AMP_PATCH_KERNELS."
        )
    return (
        f"AMP_PATCH_KERNELS=cupy needs all kernels to compile and load; got of {source} {reason}; "
        "call os.environ.pop('AMP_PATCH_KERNELS') or unset it in the shell, then torch does what "
        "these would do; report what amp-patch doctor says."
    )


def _warning(source: str | None, reason: str) -> str:
    if source is None:
        return (
            "The CUDA kernels of amp_patch cannot be used, slower operations of torch take their "
            f"place: {reason}. To use them, {_mend()}; to go on without this warning, set "
            "AMP_PATCH_KERNELS=torch."
        )
    return (
        f"The CUDA kernels of {source} cannot be used, slower operations of torch take their "
        f"place: {reason}. Those of other sources are used. Report what amp-patch doctor says; "
        "AMP_PATCH_KERNELS=torch switches all kernels off."
    )


def _mend() -> str:
    major = str(torch.version.cuda).partition(".")[0]
    has_extra = major in ("12", "13")
    package = f"'amp_patch[cuda{major}]'" if has_extra else f"cupy-cuda{major}x"
    return f"call pip install {package}"


def reset() -> None:
    """Start a session afresh: try again to load kernels that failed, give up shared tables.

    Kernels that were loaded stay: CUDA graphs may still launch them.
    """
    cuda_module.modules.forget_failures()
    forget_splits()
