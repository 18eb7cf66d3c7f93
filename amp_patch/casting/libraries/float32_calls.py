"""Calls whose half arguments are computed in float32, whatever dtypes come.

Knows at which level, and where a model is stored in half, each kind of them is, and which dtype
its results have; knows no rule's words.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from amp_patch.casting import Args, Function, fused_loss
from amp_patch.casting.argument_casts import to_float
from amp_patch.casting.cached_casts import is_large
from amp_patch.casting.mode import FLOATS, OFF, mode, process
from amp_patch.casting.nested import map_tensors
from amp_patch.casting.regions import FloatRegion
from amp_patch.levels import HALVES

from .call_arguments import Kwargs, NothingElseCasts, cast_to, floats_in, map_call, to_any
from .foreign_objects import has_more_neighbours
from .promoted_calls import always, run_promoted


def run_widened(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it with half arguments in float32, beside models as well: it would raise."""
    args, kwargs = map_call(to_float, args, kwargs)
    return function(*args, **kwargs)


def run_like_first(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it so; results have the dtype of its first argument, the features that it samples."""
    features = _first(args, kwargs)
    with NothingElseCasts():  # a region would cast what is made of the boxes inside
        found = run_widened(function, args, kwargs)
    dtype = getattr(features, "dtype", None)
    return to_any(found, dtype) if dtype in HALVES else found


def run_wide(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it in a model that is stored in half with half arguments in float32."""
    if mode.stored is None or mode.region is not None:
        return function(*args, **kwargs)
    return run_widened(function, args, kwargs)


def run_rounded(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it so, and cast its results to the model's dtype."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)
    args, kwargs = map_call(to_float, args, kwargs)
    return to_any(function(*args, **kwargs), dtype)


def run_lengths(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it so where the first is half, unless it is told the dtype of its results."""
    dtype = mode.stored
    if dtype is None or mode.region is not None or kwargs.get("dtype") is not None:
        return function(*args, **kwargs)
    first = _first(args, kwargs)
    if getattr(first, "dtype", None) not in HALVES:
        return function(*args, **kwargs)  # a script that writes x.float().norm() means it
    if is_large(first):  # it is not kept for backward in float32
        return run_promoted(False, always, function, args, kwargs, rounds_saved=False)
    # no containers of tensors, but dimensions and the like
    args = tuple([to_float(one) if isinstance(one, Tensor) else one for one in args])
    if kwargs:
        kwargs = {
            name: to_float(one) if isinstance(one, Tensor) else one for name, one in kwargs.items()
        }
    return to_any(function(*args, **kwargs), dtype)


def run_steep(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it so in a model that is stored in float16, whose range its backward would leave.

    What backward needs of much is kept in half, see `promoted_calls`.
    """
    if not _is_float16_in_model(_first(args, kwargs)):
        return function(*args, **kwargs)
    return run_promoted(False, always, function, args, kwargs)


def run_powers(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a power so where its exponent is a number below 0.

    Where the exponent is a floating tensor, which may learn, the results stay in float32: a
    generalized mean takes the root of a mean of powers, of which small ones are 0 in float16.
    """
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    is_learned = isinstance(exponent, Tensor) and exponent.is_floating_point()
    if is_learned and _is_float16_in_model(_first(args, kwargs)):
        return run_wide(function, args, kwargs)
    if isinstance(exponent, (int, float)) and exponent < 0:
        return run_steep(function, args, kwargs)
    return function(*args, **kwargs)


def _first(args: Args, kwargs: Kwargs) -> Any:
    """Return the first argument, by whatever name torch's functions have it."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("input", "x", "x1") if name in kwargs), None)


def _is_float16_in_model(argument: Any) -> bool:
    """Tell whether an argument is in float16, and the running model is stored in it."""
    half = torch.float16
    return getattr(argument, "dtype", None) is half and mode.stored is half and mode.region is None


def run_float_on_cpu(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it with half arguments on a CPU in float32; results have the dtype of a model."""
    if not any(tensor.is_cpu and tensor.dtype in HALVES for tensor in floats_in(args, kwargs)):
        return function(*args, **kwargs)
    found, dtype = run_widened(function, args, kwargs), mode.stored
    return found if dtype is None or mode.region is not None else cast_to(found, dtype)


def run_logits(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call torch's cross_entropy as by "wide", or a kernel that computes it in float32."""
    # Of half logits outside of such a model torch's loss is half.
    dtypes = (torch.float32,) if mode.stored is None else FLOATS
    if not mode.off and process.is_mixed:
        loss = fused_loss.loss_of(args, kwargs, dtypes)
        if loss is not None:
            return loss
    return run_wide(function, args, kwargs)


def run_float(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it in float32 where a level casts; in a stored model with results in its dtype."""
    level, dtype = mode.dtype or process.dtype, mode.stored
    if mode.region is not None or (level is OFF and dtype is None):
        return function(*args, **kwargs)
    found = in_float_region(function, args, kwargs)
    return found if dtype is None else cast_to(found, dtype)


def run_loss(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a model's method in float32, which scripts call beside the model, at every level."""
    if mode.region is not None or not process.is_mixed:
        return function(*args, **kwargs)
    return in_float_region(function, args, kwargs)


def run_unless_hub(run: Function, function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it as ``run`` does, or in float32 on a graph whose neighbours float16 cannot count."""
    half = mode.stored or mode.dtype or process.dtype
    if half is torch.float16 and mode.region is None and not is_compiling():
        largest = int(torch.finfo(half).max)
        if any(has_more_neighbours(one, largest) for one in (*args, *kwargs.values())):
            return cast_to(in_float_region(function, args, kwargs), half)
    return run(function, args, kwargs)


def in_float_region(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it with all arguments in float32, and with all that is computed inside."""
    args, kwargs = map_call(functools.partial(cast_to, dtype=torch.float32), args, kwargs)
    with FloatRegion():  # layers inside may have half weights
        return function(*args, **kwargs)


def run_told(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call what counts in float32, where it adds up half weights or is told a half dtype.

    Of a count that float16 does not hold, the result is the largest that it does.
    """
    dtypes = {tensor.dtype for tensor in floats_in(args, kwargs)}
    if not dtypes:
        told = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
        dtypes.update(told[:1])
    dtype = dtypes.pop() if len(dtypes) == 1 else None  # two promote to float32 or float64
    if dtype not in HALVES:
        return function(*args, **kwargs)

    def wide(one: Any) -> Any:
        return torch.float32 if isinstance(one, torch.dtype) else cast_to(one, torch.float32)

    def narrow(found: Tensor) -> Tensor:
        if not found.is_floating_point():
            return found
        # bfloat16 holds any count; the values of a sparse matrix are none
        if dtype is torch.float16 and found.layout is torch.strided:
            found = found.clamp(max=torch.finfo(dtype).max)
        return found.to(dtype)

    args, kwargs = map_call(wide, args, kwargs)
    with NothingElseCasts():  # what it calls would give half sums in a model that is in half
        found = function(*args, **kwargs)
    return map_tensors(narrow, found)
