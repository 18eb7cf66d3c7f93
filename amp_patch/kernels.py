"""The fused operations by name, over lists of tensors; knows nothing of models or optimizers.

One pass over the gradients receives, unscales and checks them; what it found stays on the device
until asked.
"""

from __future__ import annotations

from .cuda_compiler import source
from .torch_kernels import (
    Cast,
    Comparison,
    GradCheck,
    Unscale,
    accumulate,
    alike,
    clip_by_norm,
    values,
)

__all__ = [
    "Cast",
    "Comparison",
    "GradCheck",
    "Unscale",
    "accumulate",
    "alike",
    "clip_by_norm",
    "source",
    "values",
]
