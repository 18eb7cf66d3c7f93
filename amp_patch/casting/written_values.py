"""Values that are written to a part of a tensor come in its dtype (O1, O4).

``out[mask] = y`` and ``out.index_add_(0, index, y)`` take one dtype. Where functions cast, a script
that was right in float32 meets two: ``out`` is of ``torch.zeros``, and ``y`` of a product. So the
values are cast, as torch itself does it for ``out[2:4] = y`` and ``out.copy_(y)``. torch.autocast
leaves such a write to fail. Knows the mode of the thread, and nothing of the rules of functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .argument_casts import to_dtype
from .mode import FLOATS, casts_are_on
from .torch_compile import leave_out

Function = Callable[..., Any]

#: Methods of Tensor.
_WRITES = (
    "__setitem__",
    "index_add_",
    "index_copy_",
    "index_put_",
    "index_reduce_",
    "masked_scatter_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
)
#: For each dtype those that are cast to it.
_OTHERS = {dtype: tuple(one for one in FLOATS if one is not dtype) for dtype in FLOATS}


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each method by its path, what makes its replacement."""
    return {f"torch.Tensor.{name}": _casting for name in _WRITES}


def _casting(original: Function) -> Function:
    @leave_out  # between two graphs torch would compile it for each kind of write
    @functools.wraps(original)
    def write(target: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = _OTHERS.get(target.dtype)
        if others is None or not casts_are_on():
            return original(target, *args, **kwargs)
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor) and value.dtype in others:
                args = tuple([_as(value, target.dtype) for value in args])
                kwargs = {key: _as(value, target.dtype) for key, value in kwargs.items()}
                break
        return original(target, *args, **kwargs)

    replacement: Any = write
    replacement.__prepare_scriptable__ = lambda: original  # TorchScript casts nothing
    return write


def _as(value: Any, dtype: torch.dtype) -> Any:
    return to_dtype(value, dtype) if isinstance(value, Tensor) else value
