"""Numbers of a script's own that half precision does not have, as -1e9 and 1 - 1e-4.

A script that is right in float32 masks by ``scores.masked_fill(mask, -1e9)``, which raises in
float16, or by ``torch.where(mask, scores, -1e9)``, which is -inf there, and makes NaN of a row that
is masked as a whole. What is written is the nearest number that half has, and not infinite: -65504.

It bounds by ``p.clamp(1e-4, 1 - 1e-4)`` or ``p.logit(eps=1e-4)``, so that neither ``p.log()`` nor
``(1 - p).log()`` is infinite. Rounded to half that upper bound is 1. So a bound is rounded to its
own side: what comes out is within the bounds that were given. torch.autocast leaves both to fail.

Knows the mode of the thread, and nothing of the rules of functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.levels import HALVES
from amp_patch.patching import hide_from_torchscript

from . import Function
from .mode import casts_are_on, mode
from .torch_compile import leave_out

#: What fills a tensor, or a part of it, with a number. `written_values` has those that write at
#: indices.
_FILLS = (
    "torch.Tensor.fill_",
    "torch.Tensor.fill_diagonal_",
    "torch.Tensor.index_fill",
    "torch.Tensor.index_fill_",
    "torch.Tensor.masked_fill",
    "torch.Tensor.masked_fill_",
    "torch.Tensor.nan_to_num",
    "torch.Tensor.nan_to_num_",
    "torch.Tensor.new_full",
    "torch.Tensor.to_padded_tensor",
    "torch.Tensor.where",
    "torch._C._nn.pad_sequence",
    "torch.constant_pad_nd",
    "torch.fill",
    "torch.fill_",
    "torch.full",
    "torch.full_like",
    "torch.index_fill",
    "torch.masked_fill",
    "torch.nan_to_num",
    "torch.nan_to_num_",
    "torch.nn.functional.pad",
    "torch.nn.functional.threshold",
    "torch.nn.functional.threshold_",
    "torch.threshold",
    "torch.threshold_",
    "torch.where",
)
_FILL_NAMES = frozenset(path.rpartition(".")[2] for path in _FILLS)
_FILL_NAMES |= {"_threshold", "scatter", "scatter_"}
#: The names of bounds, in their order after the tensor.
_BOUNDS = {
    "clamp": ("min", "max"),
    "clamp_": ("min", "max"),
    "clamp_max": ("max",),
    "clamp_max_": ("max",),
    "clamp_min": ("min",),
    "clamp_min_": ("min",),
    "clip": ("min", "max"),
    "clip_": ("min", "max"),
    "hardtanh": ("min_val", "max_val"),
    "hardtanh_": ("min_val", "max_val"),
    "logit": ("eps",),
    "logit_": ("eps",),
    "special_logit": ("eps",),
}
_BOUNDING = (
    "torch._C._nn.hardtanh",
    "torch._C._nn.hardtanh_",
    "torch.nn.functional.hardtanh_",
    "torch.special.logit",
    *(
        f"{place}.{name}"
        for place in ("torch", "torch.Tensor")
        for name in _BOUNDS
        if not name.startswith(("hardtanh", "special"))
    ),
)
_NUMBERS = (float, int)
#: Bounds that both half dtypes have, as 0, 1 and 6.
_EXACT = frozenset({*range(-256, 257), math.inf, -math.inf, None})
#: Of which kinds bounds may be that are looked up there; no symbol of a compiled function.
_KINDS = frozenset({int, float, type(None)})
_LEAST_RANGE = torch.finfo(torch.float16).max
_HALF_OF_THE_LEAST = torch.finfo(torch.float16).smallest_normal * 2.0**-11


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each path of a function, what makes its replacement."""
    return {**dict.fromkeys(_FILLS, _filling), **dict.fromkeys(_BOUNDING, _bounding)}


def in_half(name: str, args: Any, kwargs: Any, half: torch.dtype) -> tuple[Any, Any]:
    """Return the arguments of a function of this name with numbers that a half dtype has."""
    if name in _FILL_NAMES:
        args = tuple([within(value, half) for value in args])
        return args, {key: within(value, half) for key, value in kwargs.items()}
    bounds = _BOUNDS.get(name, ())
    if bounds:
        given, others = args[1 : 1 + len(bounds)], args[1 + len(bounds) :]
        pairs = zip(bounds[: len(given)], given, strict=True)  # torch 2.6 compiles no other
        args = (*args[:1], *[_bound(bound, value, half) for bound, value in pairs], *others)
        kwargs = {
            key: _bound(key, value, half) if key in bounds else value
            for key, value in kwargs.items()
        }
    return args, kwargs


def in_its_dtype(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the same for the dtype that the function fills or bounds in, if that is half."""
    if name in _BOUNDS:
        dtype = getattr(args[0] if args else kwargs.get("input"), "dtype", None)
    elif name not in _FILL_NAMES or not (
        any(map(_may_be_lost, args)) or any(map(_may_be_lost, kwargs.values()))
    ):
        return args, kwargs  # as most often
    else:
        dtype = kwargs.get("dtype") or _dtype_of_floats((*args, *kwargs.values()))
    return in_half(name, args, kwargs, dtype) if dtype in HALVES else (args, kwargs)


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
    name = original.__name__  # torch 2.15 compiles it as another

    @leave_out  # between two graphs torch would compile it for each kind of call
    @functools.wraps(original)
    def filling(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            for value in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(value, _NUMBERS) and _may_be_lost(value):
                    break
            else:  # as most often
                return original(*args, **kwargs)
        if mode.stored is not None or casts_are_on():
            args, kwargs = in_its_dtype(name, args, kwargs)
        return original(*args, **kwargs)

    return hide_from_torchscript(filling, original)


def _bounding(original: Function) -> Function:
    name = original.__name__  # as above

    @leave_out  # as above
    @functools.wraps(original)
    def bounding(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            bounds = (*args[1:], *kwargs.values()) if kwargs else args[1:]  # no `out`: a tensor
            if _KINDS.issuperset(map(type, bounds)) and _EXACT.issuperset(bounds):
                return original(*args, **kwargs)
            if args and getattr(args[0], "dtype", None) is torch.float32:
                return original(*args, **kwargs)
        if mode.stored is not None or casts_are_on():
            args, kwargs = in_its_dtype(name, args, kwargs)
        return original(*args, **kwargs)

    return hide_from_torchscript(bounding, original)


def _bound(name: str, value: Any, half: torch.dtype) -> Any:
    """Return a bound of this name, rounded to its side; what is no number as it is.

    By products and comparisons alone: in a compiled function the number may be a symbol.
    """
    if not isinstance(value, _NUMBERS) or value != value:
        return value
    info = torch.finfo(half)
    if name == "eps":  # bounds are eps and 1 - eps, which must not be 1
        return max(value, info.eps / 2) if value > 0 else value
    if not -info.max <= value <= info.max:
        return value if abs(value) == math.inf else math.copysign(info.max, value)
    if abs(value) < info.smallest_normal:
        apart = info.smallest_normal * info.eps
        return (math.ceil if name.startswith("min") else math.floor)(value / apart) * apart
    nearest = _rounded(value, info.eps)
    side = 1.0 if name.startswith("min") else -1.0
    if side * nearest >= side * value:
        return nearest
    # The next number lies 0.5 to 1 eps away, the one after it twice that: 0.6 rounds to the next.
    return _rounded(nearest + side * 0.6 * info.eps * abs(nearest), info.eps)


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
        if isinstance(value, (list, tuple)):
            found = _dtype_of_floats(tuple(value))
            if found is not None:
                return found
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return value.dtype
    return None
