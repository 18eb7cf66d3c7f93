"""Values that are written to a tensor, or to a part of it, come in its dtype.

``out[mask] = y``, ``out.index_add_(0, index, y)`` and ``out.addmm_(x, y)`` take one dtype. Where
functions cast (O1, O4), and in a model that is stored in half (O2, O3, O5), a script that was right
in float32 meets two: ``out`` is of ``torch.zeros``, and ``y`` of a product. So the values are cast,
as torch itself does it for ``out[2:4] = y`` and ``out.copy_(y)``. torch.autocast leaves such a
write to fail. A number comes within the range, see `half_numbers`, and what is added to half values
is added up in float32, see `added_values`. Knows the mode of the thread,
and nothing of the rules of functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.levels import HALVES
from amp_patch.patching import hide_from_torchscript

from . import Args, Function
from .added_values import adding_in_float32
from .argument_casts import to_dtype
from .half_numbers import within
from .mode import OTHER_FLOATS, casts_are_on, mode
from .torch_compile import leave_out

Kwargs = dict[str, Any]

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
#: Methods of Tensor that add a product of two tensors to it.
_PRODUCTS = ("addbmm_", "addmm_", "addmv_", "baddbmm_")
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
#: What is multiplied by, and not written: a product is to be within the range, not its factors.
_FACTORS = frozenset({"alpha", "beta"})
_NUMBERS = (int, float)  # no union: torch 2.6 compiles none
#: Of which kinds the parts of a place are that is a view of the tensor.
_OF_VIEWS = frozenset({int, slice, type(None), type(...)})


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each path of a function, what makes its replacement where functions cast."""
    names = (*_WRITES, *_PRODUCTS, *_WRITES_TO_A_COPY)
    paths = [f"torch.Tensor.{name}" for name in names]
    paths += [f"torch.{name}" for name in _WRITES_TO_A_COPY]
    return dict.fromkeys(paths, _casting)


def replacements_for_half() -> dict[str, Callable[[Function], Function]]:
    """Return the same for models that are stored in half."""
    ruled = [f"{place}.{name}" for place in ("torch.Tensor", "torch") for name in _RULED]
    return {**replacements(), **dict.fromkeys(ruled, _casting)}


def _casting(torchs: Function) -> Function:
    original = adding_in_float32(torchs)
    values_at = 1 if original.__name__ in _PRODUCTS else -1  # else places come before them
    is_set = original.__name__ == "__setitem__"

    @leave_out  # between two graphs torch would compile it for each kind of write
    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        target: Any = args[0] if args else kwargs.get("input")
        found = getattr(target, "dtype", None)
        if len(args) > 2 and not kwargs and values_at == -1:  # as most often
            if isinstance(args[-1], Tensor) and args[-1].dtype is found:
                # Of three arguments none says to add up.
                return original(*args) if len(args) > 3 else torchs(*args)
            if is_set and _is_written_as_it_is(args, found):
                return torchs(*args)
        if len(args) > 1 and _are_of(found, args[values_at:], kwargs.values()):
            return original(*args, **kwargs)
        if found in OTHER_FLOATS and (mode.stored is not None or casts_are_on()):
            args, kwargs = _cast(found, args, kwargs)
        return original(*args, **kwargs)

    return hide_from_torchscript(write, torchs)


def _is_written_as_it_is(args: Args, found: torch.dtype | None) -> bool:
    """Tell whether ``target[place] = value`` needs no cast of ours."""
    return (found not in HALVES and isinstance(args[2], _NUMBERS)) or _is_copied(*args)


def _are_of(dtype: torch.dtype | None, values: Args, named: Iterable[Any]) -> bool:
    """Tell whether all that is written is in a dtype; of what is named, tensors alone count."""
    tensors = [value for value in named if isinstance(value, Tensor)]
    return all(isinstance(value, Tensor) and value.dtype is dtype for value in (*values, *tensors))


def _cast(dtype: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments of a write to a tensor of a dtype, in that and within its range."""
    others = OTHER_FLOATS[dtype]
    if any(
        isinstance(value, Tensor) and value.dtype in others for value in (*args, *kwargs.values())
    ):
        args = tuple([_as(value, dtype) for value in args])
        kwargs = {key: _as(value, dtype) for key, value in kwargs.items()}
    if dtype in HALVES:  # a number after the place that it is written to
        args = (*args[:2], *[within(value, dtype) for value in args[2:]])
        kwargs = {
            key: value if key in _FACTORS else within(value, dtype) for key, value in kwargs.items()
        }
    return args, kwargs


def _is_copied(target: Any, place: Any, value: Any) -> bool:
    """Tell a write at ints and slices, which torch makes of any dtype: it copies into a view.

    Not of a value that is expanded, for its gradient: that is to be added up before it is cast.
    """
    kinds = list(map(type, place)) if type(place) is tuple else [type(place)]
    if is_dynamo_compiling() or not _OF_VIEWS.issuperset(kinds):
        return False
    if type(target) is not Tensor or type(value) is not Tensor:
        return False
    dim = target.dim() - kinds.count(int) + kinds.count(type(None))
    return not value.requires_grad or (value.dim() == dim and 1 not in value.shape)


def _as(value: Any, dtype: torch.dtype) -> Any:
    return to_dtype(value, dtype) if isinstance(value, Tensor) else value
