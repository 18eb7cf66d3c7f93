"""Half values that are added up at indices are added in float32, and the sum is rounded once.

Such are a node's degree, the denominator of an attention, the count of a class. Torch adds
one by one in the tensor's dtype, where a sum of ones ends at 2048 in float16 and at 256 in
bfloat16: on a CPU in `index_put_` and its like, on a GPU in all that add by atomics. What its
kernel adds in float32 anyway is left to it. Knows these kernels and the mode of the thread; nothing
of rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, int64

from amp_patch.levels import HALVES

from . import Args, Function
from .argument_casts import tensors_in
from .mode import casts_are_on, mode

Kwargs = dict[str, Any]

#: A target of more than `_SMALL` numbers gets a float32 copy only where it has at most `_SHARE`
#: times as many as what is added to it.
_SMALL, _SHARE = 1 << 16, 16
#: Reductions that half precision is too coarse for.
_COARSE = frozenset({"mean", "prod", "sum"})


def adding_in_float32(function: Function) -> Function:
    """Return a function that adds so where functions cast, and in a model that is stored in half.

    Args:
        function: of torch, or a method of Tensor.

    Returns:
        One with results in the dtype of its first argument, which the one in place returns itself,
        written to once; any other function as it is.
    """
    name = getattr(function, "__name__", "")
    is_coarse = _ADDING.get(name.rstrip("_"))
    if is_coarse is None:
        return function
    in_place = name.endswith("_")

    @functools.wraps(function)
    def add(*args: Any, **kwargs: Any) -> Any:
        target: Any = args[0] if args else kwargs.get("input")
        dtype = getattr(target, "dtype", None)
        if dtype not in HALVES or not is_coarse(target, args, kwargs):
            return function(*args, **kwargs)
        if kwargs.get("out") is not None or not (mode.stored is not None or casts_are_on()):
            return function(*args, **kwargs)
        if target.numel() > _SMALL and _are_few(target, (args[1:], kwargs)):
            return function(*args, **kwargs)
        named = {key: _in_float32(value) for key, value in kwargs.items()}
        wide = function(*[_in_float32(value) for value in args], **named)
        return target.copy_(wide) if in_place else wide.to(dtype)

    return add


def _are_few(target: Tensor, others: Any) -> bool:
    """Return whether a copy of the target would take longer than all that is added to it.

    So it is where a few rows are added to a table of words.
    """
    most = max((one.numel() for one in tensors_in(others)), default=0)
    return target.numel() > _SHARE * most


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _given(args: Args, kwargs: Kwargs, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _accumulates(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    return bool(_given(args, kwargs, 3, "accumulate"))


def _reduces(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    return _given(args, kwargs, 4, "reduce") in _COARSE


def _adds_rows(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Return whether `index_add` would add in half; on a CPU not so rows of dimension 0."""
    if not target.is_cpu:
        return _are_many(target, args, kwargs)
    if len(args) > 2:  # as most often
        dim, index = args[1:3]
    else:
        dim, index = _given(args, kwargs, 1, "dim"), _given(args, kwargs, 2, "index")
    if target.dim() < 2 or dim not in (0, -target.dim()):
        return True
    return kwargs.get("alpha", 1) != 1 or getattr(index, "dtype", None) is not int64


def _scatters(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Return whether `scatter_add` would; on a CPU torch scatters into a float32 copy."""
    return not target.is_cpu and _are_many(target, args, kwargs)


def _scatters_reduced(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Return whether `scatter_reduce` would, which is as `scatter_add` is."""
    return _scatters(target, args, kwargs) and _reduces(target, args, kwargs)


def _are_many(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Return whether more is added along a dimension than it has places, or to single numbers.

    Else sums are short: an expert of a mixture adds the rows of its tokens, each of them once, to
    those of all. A float32 copy of all for each expert would take longer than what it computes.
    """
    if target.dim() < 2:
        return True
    dim, index = _given(args, kwargs, 1, "dim"), _given(args, kwargs, 2, "index")
    if not isinstance(dim, int) or not isinstance(index, Tensor) or index.dim() == 0:
        return False
    return index.size(dim if index.dim() > 1 else 0) > target.size(dim)


#: By a function's name what says whether a call adds in half; gets the target, and all arguments.
_ADDING: dict[str, Callable[[Tensor, Args, Kwargs], bool]] = {
    "index_add": _adds_rows,
    "index_put": _accumulates,
    "index_reduce": _reduces,
    "put": _accumulates,
    "scatter_add": _scatters,
    "scatter_reduce": _scatters_reduced,
}
