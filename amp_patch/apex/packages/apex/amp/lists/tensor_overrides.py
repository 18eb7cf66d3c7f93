"""apex's lists for methods of Tensor; scripts append to them and remove from them.

What `torch_overrides` lists holds for the methods of the same names as well.
"""

import torch

MODULE = torch.Tensor

FP16_FUNCS = ["__matmul__"]
BFLOAT16_FUNCS = list(FP16_FUNCS)
FP32_FUNCS = ["__ipow__", "__pow__", "__rpow__", "cpu"]
CASTS = [
    "__add__",
    "__div__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__iadd__",
    "__idiv__",
    "__imul__",
    "__isub__",
    "__itruediv__",
    "__le__",
    "__lt__",
    "__mul__",
    "__ne__",
    "__radd__",
    "__rdiv__",
    "__rmul__",
    "__rsub__",
    "__rtruediv__",
    "__sub__",
    "__truediv__",
]
SEQUENCE_CASTS: list[str] = []
