"""Calls in one dtype: arguments of mixed ones are promoted, and half ones computed in float32.

What backward needs of much that is computed in float32 is kept in half. Knows which dtype a call
runs in, and where a rule has it in float32; knows no rule's words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from amp_patch.casting import Args, Function
from amp_patch.casting.argument_casts import is_on_cast_device
from amp_patch.casting.cached_casts import is_large
from amp_patch.casting.mode import OFF, mode, process
from amp_patch.casting.nested import map_tensors
from amp_patch.casting.shared_casts import is_recorded
from amp_patch.levels import HALVES

from .call_arguments import Kwargs, NothingElseCasts, cast_to, floats_in, map_call, to_any
from .foreign_objects import promote_column
from .half_saving import HalfSaving
from .half_sums import add_rows, can_add

#: Tells, of the floating tensors of a call, whether half ones are computed in float32.
InFloat = Callable[[list[Tensor]], bool]


def run_promoted(
    is_half: bool,
    in_float: InFloat,
    function: Function,
    args: Args,
    kwargs: Kwargs,
    rounds_saved: bool = True,
) -> Any:
    """Call it in the widest dtype of its arguments; if ``is_half``, in a level's that casts.

    Args:
        is_half: as said.
        in_float: tells of the arguments whether half ones are computed in float32.
        function, args, kwargs: the call.
        rounds_saved: whether what backward needs of much may be rounded to half. Else that alone is
            kept in half that it holds exactly: casts of half arguments.
    """
    tensors = floats_in(args, kwargs)
    if not tensors:
        return function(*args, **kwargs)
    runs_in, result = call_dtypes(is_half, in_float, tensors)
    if runs_in is result or not _saves_in_half(result, tensors):
        args, kwargs = map_call(functools.partial(cast_to, dtype=runs_in), args, kwargs)
        with NothingElseCasts():
            return cast_to(function(*args, **kwargs), result)
    saving = HalfSaving(result, rounds_saved)

    def widen(tensor: Tensor) -> Tensor:
        wide: Tensor = to_any(tensor, runs_in)
        saving.note(wide, tensor)
        return wide

    def narrow(tensor: Tensor) -> Tensor:
        half: Tensor = to_any(tensor, result)
        if rounds_saved:
            saving.note(tensor, half)
        return half

    args, kwargs = map_call(lambda one: map_tensors(widen, one), args, kwargs)
    with NothingElseCasts(), saving.hooks():
        found = function(*args, **kwargs)
    found = map_tensors(narrow, found)
    saving.settle()
    return found


def run_sums(in_float: InFloat, function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call what reduces rows at indices: sums and means of half ones take less memory here.

    Such functions call nothing that a level casts.
    """
    rows: Any = args[0] if args else kwargs.get("src")
    is_half = isinstance(rows, Tensor) and rows.dtype in HALVES
    if mode.region is not None or mode.stored not in (None, rows.dtype if is_half else None):
        return run_promoted(False, in_float, function, args, kwargs)
    if not is_half:
        return function(*args, **kwargs)
    try:
        index, dim, size, reduce = _besides_rows(*args, **kwargs)
    except TypeError:
        return function(*args, **kwargs)  # which says what is wrong
    is_sum = reduce in ("sum", "add", "mean") and not is_compiling() and is_on_cast_device(rows)
    if not is_sum or not can_add(rows, index, dim, size):
        return run_promoted(False, in_float, function, args, kwargs)
    return add_rows(rows, index, dim, size, reduce == "mean")


def _besides_rows(
    src: Any, index: Any, dim: Any = 0, dim_size: Any = None, reduce: Any = "sum"
) -> tuple[Any, Any, Any, Any]:
    """Return the other arguments of a call of what a rule of "sums" names."""
    return index, dim, dim_size, reduce


def run_rows(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call what writes rows of a column of DGL's, which then has the dtype of both."""
    column, *given = args
    tensors = floats_in(column.data, given, kwargs)
    if not tensors:
        return function(*args, **kwargs)
    _, dtype = call_dtypes(False, never, tensors)
    promote_column(column, dtype)
    # what says the dtype of the rows is left out: DGL finds it in them
    given = [
        cast_to(one, dtype) for one in given if not hasattr(one, "dtype") or isinstance(one, Tensor)
    ]
    return function(column, *given, **cast_to(dict(kwargs), dtype))


def call_dtypes(
    is_half: bool, in_float: InFloat, tensors: list[Tensor]
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype that a function runs in on such arguments, and that of its result."""
    dtypes = {tensor.dtype for tensor in tensors}
    widest = functools.reduce(torch.promote_types, dtypes)
    level = mode.dtype or process.dtype
    if widest is torch.float64:
        return widest, widest
    if mode.region is not None:
        runs_in = result = mode.region.dtype
    elif is_half and level is not OFF:
        runs_in = result = level
    else:
        runs_in, result = widest, mode.stored or widest
    return torch.float32 if in_float(tensors) else runs_in, result


def never(tensors: list[Tensor]) -> bool:
    """Compute no half arguments in float32."""
    return False


def always(tensors: list[Tensor]) -> bool:
    """Compute all of them so."""
    return True


def on_cpu(tensors: list[Tensor]) -> bool:
    """Compute them so where a tensor of the call is on the CPU."""
    return any(tensor.device.type == "cpu" for tensor in tensors)


def mixed_or_on_cpu(tensors: list[Tensor]) -> bool:
    """Compute them so there, and beside tensors of another dtype."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) > 1 or any(tensor.device.type == "cpu" for tensor in tensors)


def _saves_in_half(dtype: torch.dtype, tensors: list[Tensor]) -> bool:
    """Tell whether hooks keep what backward needs: of much, and where they may.

    A recomputation counts on its own hooks, and transforms of torch.func allow none.
    """
    if dtype not in HALVES or is_compiling() or mode.in_checkpoint or not torch.is_grad_enabled():
        return False
    if is_recorded():  # tensors have no memory there, by which a half one is found again
        return False
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and any(map(is_large, tensors))
