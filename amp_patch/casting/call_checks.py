"""What a wrapper asks before it casts: of the function, and of the call.

Knows tensors, which functions are torch's own and where casts do not act; casts nothing.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import has_torch_function

from . import Function
from .argument_casts import dtypes_in, is_on_cast_device, need_no_cast
from .mode import FLOATS
from .usual_calls import AUTOGRAD, below_autograd


def name_of(function: Function) -> str:
    """Return a function's name; that of its class for what has none, as ``functools.partial``."""
    return str(getattr(function, "__name__", type(function).__name__))


def is_unreplaced(function: Function) -> bool:
    """Tell torch's own function from one that stood in its place before amp_patch was imported."""
    if type(function) is types.FunctionType:  # a proxy of one says that it is an instance
        return function.__globals__ is vars(torch.functional)
    return is_in_torchs_c(function)


def is_in_torchs_c(function: Function) -> bool:
    """Return whether it is a function or method of torch's, or of a base of tensors', in C."""
    if type(function) is types.MethodDescriptorType:
        return issubclass(Tensor, function.__objclass__)
    of_torch = str(function.__module__).partition(".")[0] == "torch"
    return of_torch and type(function) is types.BuiltinFunctionType


def all_stay(
    args: tuple[Any, ...], kwargs: dict[str, Any], others: Collection[torch.dtype]
) -> bool:
    """True for a call whose arguments stay: they need no cast, or must be left alone.

    Args:
        args, kwargs: of the call.
        others: the dtypes that would be cast.
    """
    # Not asked while torch.compile traces, which would look at each argument for long.
    is_right = not is_dynamo_compiling() and need_no_cast(args, others)
    if is_right and (not kwargs or need_no_cast(kwargs.values(), others)):
        return True
    return is_left_alone(kwargs)


def is_left_alone(kwargs: dict[str, Any]) -> bool:
    """True for a call that casts must leave alone.

    Writing to ``out=`` cannot be redirected. And torch's own decompositions (of torch.compile
    and export) call the patched functions from inside the dispatcher, below autograd, where
    each dtype is what the operator's definition says.
    """
    if kwargs and kwargs.get("out") is not None:
        return True
    if is_dynamo_compiling():  # which cannot trace the next line
        return False
    is_below = below_autograd(AUTOGRAD)
    return is_below and not is_compiling() and not torch.is_inference_mode_enabled()


def asks_for_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the caller says which dtype the result is to have, by place or by name."""
    return bool(kwargs and kwargs.get("dtype")) or torch.dtype in list(map(type, args))


def are_handed_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch hands the call on to an object that is no tensor, and holds one perhaps.

    The tensors beside it stay as they are: nobody can cast what it holds.
    """
    given = (*args, *kwargs.values()) if kwargs else args
    return has_torch_function(given) and any(
        hasattr(type(one), "__torch_function__") and not isinstance(one, Tensor) for one in given
    )


def are_mixed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether tensors that a cast may touch come in several dtypes."""
    first: Any = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if value.dtype not in FLOATS:
                continue
            if first is None:
                first = value
            elif value.dtype is not first.dtype:
                if is_on_cast_device(value) and is_on_cast_device(first):
                    return True
                break
        elif isinstance(value, (list, tuple, dict)):
            break
    else:  # as an embedding bag's: a look into containers takes several times as long
        return False
    return len(set(dtypes_in((args, kwargs)))) > 1
