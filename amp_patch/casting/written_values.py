"""Values that are written to a tensor come in its dtype, and in its range.

``out[mask] = y`` and ``out.index_add_(0, index, y)`` take one dtype. Where functions cast (O1, O4),
and in a model that is stored in half (O2, O3, O5), a script that was right in float32 meets two:
``out`` is of ``torch.zeros``, and ``y`` of a product. So the values are cast, as torch itself does
it for ``out[2:4] = y`` and ``out.copy_(y)``. torch.autocast leaves such a write to fail.

So it is with a number that half cannot hold: ``scores.masked_fill(mask, -1e9)`` raises in float16,
and ``scores[mask] = -1e9`` writes -inf, of which a row that is masked as a whole becomes NaN. What
is written is the nearest finite number, -65504, as ``torch.finfo(scores.dtype).min`` would be.

Knows the mode of the thread, and nothing of the rules of functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .argument_casts import to_dtype
from .mode import FLOATS, HALVES, casts_are_on, mode
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
    "put_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
)
#: Methods of Tensor, and functions of torch, that write to a copy of their first argument.
_WRITES_TO_A_COPY = (
    "index_add",
    "index_copy",
    "index_reduce",
    "masked_scatter",
    "put",
    "scatter",
    "scatter_reduce",
)
#: The same, of which functions have a rule where they cast.
_RULED = ("index_put", "scatter_add")
#: What fills a tensor, or a part of it, with a number.
_FILLS = (
    "torch.Tensor.index_fill",
    "torch.Tensor.index_fill_",
    "torch.Tensor.masked_fill",
    "torch.Tensor.masked_fill_",
    "torch.Tensor.new_full",
    "torch.Tensor.where",
    "torch.full",
    "torch.full_like",
    "torch.index_fill",
    "torch.masked_fill",
    "torch.where",
)
#: For each dtype those that are cast to it.
_OTHERS: dict[Any, frozenset[torch.dtype]] = {
    dtype: frozenset(FLOATS) - {dtype} for dtype in FLOATS
}


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each path of a function, what makes its replacement where functions cast."""
    names = (*_WRITES, *_WRITES_TO_A_COPY)
    paths = [f"torch.Tensor.{name}" for name in names]
    paths += [f"torch.{name}" for name in _WRITES_TO_A_COPY]
    return {**dict.fromkeys(paths, _casting), **dict.fromkeys(_FILLS, _bounding)}


def replacements_for_half() -> dict[str, Callable[[Function], Function]]:
    """Return the same for models that are stored in half."""
    ruled = [f"{place}.{name}" for place in ("torch.Tensor", "torch") for name in _RULED]
    return {**replacements(), **dict.fromkeys(ruled, _casting)}


def _casting(original: Function) -> Function:
    @leave_out  # between two graphs torch would compile it for each kind of write
    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        target: Any = args[0] if args else kwargs.get("input")
        found = getattr(target, "dtype", None)
        # as most often: the values come last, in the tensor's own dtype
        if len(args) > 1 and isinstance(args[-1], Tensor) and args[-1].dtype is found:
            return original(*args, **kwargs)
        others = _OTHERS.get(found)
        if others is None or not (mode.stored is not None or casts_are_on()):
            return original(*args, **kwargs)
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor) and value.dtype in others:
                args = tuple([_as(value, target.dtype) for value in args])
                kwargs = {key: _as(value, target.dtype) for key, value in kwargs.items()}
                break
        if found in HALVES:  # a number behind the place that it is written to
            args = (*args[:2], *[_within(value, found) for value in args[2:]])
            kwargs = {key: _within(value, found) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    replacement: Any = write
    replacement.__prepare_scriptable__ = lambda: original  # TorchScript casts nothing
    return write


def _bounding(original: Function) -> Function:
    @leave_out
    @functools.wraps(original)
    def fill(*args: Any, **kwargs: Any) -> Any:
        if not (any(map(_is_far, args)) or (kwargs and any(map(_is_far, kwargs.values())))):
            return original(*args, **kwargs)  # as most often
        dtype = kwargs.get("dtype") or _dtype_of_floats((*args, *kwargs.values()))
        if dtype in HALVES and (mode.stored is not None or casts_are_on()):
            args = tuple([_within(value, dtype) for value in args])
            kwargs = {key: _within(value, dtype) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    replacement: Any = fill
    replacement.__prepare_scriptable__ = lambda: original
    return fill


def _as(value: Any, dtype: torch.dtype) -> Any:
    return to_dtype(value, dtype) if isinstance(value, Tensor) else value


def _within(value: Any, half: torch.dtype) -> Any:
    """Return a number within the range of a half dtype, unless it is infinite; else the value.

    Of numbers in tensors nobody knows what they stand for, nor whether they were computed.
    """
    if not _is_far(value):
        return value
    most = torch.finfo(half).max
    return max(-most, min(most, value))


def _is_far(value: Any) -> bool:
    """Tell whether a finite number may lie beyond the range of a half dtype."""
    return isinstance(value, float | int) and _LEAST_RANGE < abs(value) < math.inf


def _dtype_of_floats(values: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype of the first tensor of several floating-point numbers."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value.dtype
    return None


_LEAST_RANGE = torch.finfo(torch.float16).max
