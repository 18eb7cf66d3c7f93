"""Calls whose arguments or results are cast to half; and those that nothing is to cast.

To the dtype of the running model, of the level, or of an operator's author. Knows no rule's words.
"""

from __future__ import annotations

import functools
from typing import Any

from amp_patch.casting import Args, Function
from amp_patch.casting.mode import OFF, mode, process

from .call_arguments import Kwargs, NothingElseCasts, cast_to, floats_in, map_call
from .float32_calls import in_float_region
from .foreign_objects import cast_frame
from .promoted_calls import InFloat, never


def run_stored(in_float: InFloat, function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it in a model that is stored in half with arguments in its dtype, results as well."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)
    # `never` needs no look for tensors
    if in_float is never or not in_float(floats_in(args, kwargs)):
        args, kwargs = map_call(functools.partial(cast_to, dtype=dtype), args, kwargs)
        return cast_to(function(*args, **kwargs), dtype)
    return cast_to(in_float_region(function, args, kwargs), dtype)


def run_frames(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it in such a model with the features in DGL's frames in its dtype."""
    dtype = mode.stored
    if dtype is None or mode.region is not None:
        return function(*args, **kwargs)

    def cast(value: Any) -> Any:
        return cast_frame(value, dtype, lambda inner: cast_to(inner, dtype))

    args, kwargs = map_call(cast, args, kwargs)
    return function(*args, **kwargs)


def run_result(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it, at O1 and O4 with results in half."""
    found = function(*args, **kwargs)
    level = mode.dtype or process.dtype
    return found if level is OFF or mode.region is not None else cast_to(found, level)


def run_registered(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call a custom operator, where casts are on, as `torch.autocast` does: as is registered."""
    dtypes = getattr(args[0], "_autocast_dtype", None)  # only newer torch has them
    tensors = floats_in(args[1:], kwargs) if dtypes else []
    dtype = dtypes.get(tensors[0].device.type) if dtypes and tensors else None
    if dtype is None or (mode.dtype or process.dtype) is OFF:
        return function(*args, **kwargs)
    args, kwargs = map_call(functools.partial(cast_to, dtype=dtype), args, kwargs)
    with NothingElseCasts():
        return function(*args, **kwargs)


def run_uncast(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call it without casts, but in a model that is stored in half."""
    if mode.stored is not None:
        return function(*args, **kwargs)
    with NothingElseCasts():
        return function(*args, **kwargs)
