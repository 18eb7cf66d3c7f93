"""apex.fused_dense: linear layers, alone and in pairs with GELU between."""

from . import fused_dense
from .fused_dense import (
    DenseNoBias,
    DenseNoBiasFunc,
    FusedDense,
    FusedDenseFunc,
    FusedDenseGeluDense,
    FusedDenseGeluDenseFunc,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

__all__ = [
    "DenseNoBias",
    "DenseNoBiasFunc",
    "FusedDense",
    "FusedDenseFunc",
    "FusedDenseGeluDense",
    "FusedDenseGeluDenseFunc",
    "dense_no_bias_function",
    "fused_dense",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]
