"""Fused operations over lists of tensors: CUDA kernels where they work, else torch's functions.

Knows tensors and plain numbers; nothing of models, optimizers or loss scalers. The other rooms
import from here; `choice` decides which implementation serves.
"""

from .choice import (
    Cast,
    Check,
    Comparison,
    CudaCheck,
    GradCheck,
    HostCopy,
    ScalerState,
    Unscale,
    accumulate,
    alike,
    are_used,
    clip_by_norm,
    multiply,
    source,
    update_scale,
    values,
)

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
