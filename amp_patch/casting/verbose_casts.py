"""Tells of the casts that wrappers make, in apex's words, where a script asks for it.

Knows which rule casts what; knows nothing of who listens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from amp_patch.levels import HALVES

from . import Function
from .argument_casts import dtypes_in, tensors_in, to_dtype
from .call_checks import is_left_alone, name_of
from .mode import OFF, mode, process

#: Called for each cast with apex's words, "Float->Half (linear)".
Observer = Callable[[str], None]

#: What an observer hears of, by rule: the dtypes that are cast, and apex's words for it. Of
#: "half_out" it hears by `telling_cast`, for what that casts depends on the call.
_REPORTS = {
    "half": ((torch.float32,), "Float->Half"),
    "bfloat16": ((torch.float32,), "Float->BFloat16"),
    "float": (HALVES, "Half->Float"),
    "float_dtype": (HALVES, "Half->Float"),
}


def telling(wrapper: Function, function: Function, rule: str, observer: Observer) -> Function:
    """Return a wrapper that tells of the tensors it gets in a dtype that its rule casts.

    Args:
        wrapper: casts, by the rule; returned as it is where there is nothing to tell.
        function: what it wraps.
        rule: see `Casts.wrap`.
        observer: is told.
    """
    if rule not in _REPORTS:
        return wrapper
    dtypes, words = _REPORTS[rule]

    @functools.wraps(function)
    def tells(*args: Any, **kwargs: Any) -> Any:
        on = (mode.dtype or process.dtype) is not OFF and not is_compiling()
        # softmax() calls the method of the same name, and gives it the dtype
        asked = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if on and not asked and not is_left_alone(kwargs):
            for tensor in tensors_in((args, kwargs)):
                if tensor.dtype in dtypes and tensor.device.type in process.devices:
                    observer(f"{words} ({name_of(function)})")
        return wrapper(*args, **kwargs)

    return tells


def telling_cast(observer: Observer, name: str) -> Function:
    """Return `to_dtype` for a function, telling of each tensor that it casts from or to fp32."""

    def cast(value: Any, dtype: torch.dtype, weight: Function | None = None) -> Any:
        dtypes, words = _REPORTS["half" if dtype in HALVES else "float"]
        if not is_compiling():
            for found in dtypes_in(value):
                if found in dtypes:
                    observer(f"{words} ({name})")
        return to_dtype(value, dtype, weight)

    return cast
