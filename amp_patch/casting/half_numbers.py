"""Numbers of a script's own that half precision does not have, as -1e9 and 1 - 1e-4.

A script that is right in float32 masks by ``scores.masked_fill(mask, -1e9)``, which raises in
float16, or by ``torch.where(mask, scores, -1e9)``, which is -inf there, and makes NaN of a row that
is masked as a whole. What is written is the nearest number that half has, and not infinite: -65504.

It bounds by ``p.clamp(1e-4, 1 - 1e-4)``, so that neither ``p.log()`` nor ``(1 - p).log()`` is
infinite. Rounded to half that upper bound is 1. So a bound is rounded to its own side: what comes
out is within the bounds that were given. torch.autocast leaves both to fail.

Knows the mode of the thread, and nothing of the rules of functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .mode import HALVES, casts_are_on, mode
from .torch_compile import leave_out

Function = Callable[..., Any]

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
    "torch.nn.functional.pad",
    "torch.where",
)
#: The names of these functions alone.
FILLS = frozenset(path.rpartition(".")[2] for path in _FILLS)
#: Methods of Tensor, and functions of torch, with the names of their bounds behind the tensor.
_CLAMPS = {
    "clamp": ("min", "max"),
    "clamp_": ("min", "max"),
    "clamp_max": ("max",),
    "clamp_max_": ("max",),
    "clamp_min": ("min",),
    "clamp_min_": ("min",),
    "clip": ("min", "max"),
    "clip_": ("min", "max"),
}
_NUMBERS = (float, int)
_LEAST_RANGE = torch.finfo(torch.float16).max
_HALF_OF_THE_LEAST = torch.finfo(torch.float16).smallest_normal * 2.0**-11


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each path of a function, what makes its replacement."""
    clamps = {
        f"{place}.{name}": functools.partial(_clamping, bounds)
        for place in ("torch.Tensor", "torch")
        for name, bounds in _CLAMPS.items()
    }
    return {**dict.fromkeys(_FILLS, _filling), **clamps}


def within(value: Any, half: torch.dtype) -> Any:
    """Return the nearest finite number of a half dtype, and not 0 for another; else the value.

    Of numbers in tensors nobody knows what they stand for, nor whether they were computed.
    """
    if not _may_be_lost(value):
        return value
    info = torch.finfo(half)
    least = info.smallest_normal * info.eps
    return math.copysign(max(least, min(abs(value), info.max)), value)


def _filling(original: Function) -> Function:
    @leave_out  # between two graphs torch would compile it for each kind of call
    @functools.wraps(original)
    def fill(*args: Any, **kwargs: Any) -> Any:
        if not (any(map(_may_be_lost, args)) or any(map(_may_be_lost, kwargs.values()))):
            return original(*args, **kwargs)  # as most often
        dtype = kwargs.get("dtype") or _dtype_of_floats((*args, *kwargs.values()))
        if dtype in HALVES and (mode.stored is not None or casts_are_on()):
            args = tuple([within(value, dtype) for value in args])
            kwargs = {key: within(value, dtype) for key, value in kwargs.items()}
        return original(*args, **kwargs)

    return _scriptable(fill, original)


def _clamping(names: tuple[str, ...], original: Function) -> Function:
    @leave_out
    @functools.wraps(original)
    def clamp(*args: Any, **kwargs: Any) -> Any:
        dtype = getattr(args[0] if args else kwargs.get("input"), "dtype", None)
        if dtype in HALVES and (mode.stored is not None or casts_are_on()):
            given, others = args[1 : 1 + len(names)], args[1 + len(names) :]
            pairs = zip(names[: len(given)], given, strict=True)  # torch 2.6 compiles no other
            args = (*args[:1], *[_bound(name, value, dtype) for name, value in pairs], *others)
            kwargs = {name: _bound(name, value, dtype) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    return _scriptable(clamp, original)


def _scriptable(replacement: Any, original: Function) -> Function:
    replacement.__prepare_scriptable__ = lambda: original  # TorchScript casts nothing
    return replacement  # type: ignore[no-any-return]  # a function, with an attribute of our own


def _bound(name: str, value: Any, half: torch.dtype) -> Any:
    """Return a bound of a clamp, rounded to its side; any other argument as it is.

    By products and comparisons alone: in a compiled function the number may be a symbol.
    """
    if name not in ("min", "max") or not isinstance(value, _NUMBERS) or value != value:
        return value
    info = torch.finfo(half)
    if not -info.max <= value <= info.max:
        return value if abs(value) == math.inf else math.copysign(info.max, value)
    if abs(value) < info.smallest_normal:
        apart = info.smallest_normal * info.eps
        return (math.ceil if name == "min" else math.floor)(value / apart) * apart
    nearest = _rounded(value, info.eps)
    side = 1.0 if name == "min" else -1.0
    if side * nearest >= side * value:
        return nearest
    # by three quarters of what lies between two numbers, or by up to twice as much
    return _rounded(nearest + side * 0.75 * info.eps * abs(nearest), info.eps)


def _rounded(value: float, eps: float) -> float:
    """Return the nearest number of as many bits as a dtype of this precision has.

    Source: Veltkamp's splitting, in T. J. Dekker, A floating-point technique for extending the
    available precision, Numerische Mathematik 18, 1971.
    """
    shifted = value * (2.0**52 * eps + 1.0)
    return shifted - (shifted - value)


def _may_be_lost(value: Any) -> bool:
    """Tell whether a finite number may become infinite in half, or 0."""
    if not isinstance(value, _NUMBERS):
        return False
    size = abs(value)
    return _LEAST_RANGE < size < math.inf or 0 < size <= _HALF_OF_THE_LEAST


def _dtype_of_floats(values: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype of the first tensor of several floating-point numbers."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value.dtype
    return None
