"""Fused operations over lists of tensors: CUDA kernels where they work, else torch's functions.

Knows tensors and plain numbers; nothing of models, optimizers or loss scalers. The other rooms
import from here; `choice` decides for each list whether kernels or torch's functions do it.
"""

from .choice import (
    Checker,
    accumulate,
    are_on_cuda,
    are_used,
    caster,
    checker,
    clip_by_norm,
    comparison,
    cross_entropy,
    is_on_cuda,
    reset,
    unscale,
    unscaler,
    update_scale,
)
from .cuda_compiler import source
from .cuda_kernels import GradCheck as CudaGradCheck
from .host_copy import HostCopy
from .scaler_state import ScalerState
from .torch_kernels import Flags, GradCheck, alike, multiply, values

__all__ = [
    "Checker",
    "CudaGradCheck",
    "Flags",
    "GradCheck",
    "HostCopy",
    "ScalerState",
    "accumulate",
    "alike",
    "are_on_cuda",
    "are_used",
    "caster",
    "checker",
    "clip_by_norm",
    "comparison",
    "cross_entropy",
    "is_on_cuda",
    "multiply",
    "reset",
    "source",
    "unscale",
    "unscaler",
    "update_scale",
    "values",
]
