"""The functions by which code switches autocast off and on again, by hand (O1, O4).

``torch.set_autocast_enabled(device, False)``, some lines, and the same with what
``torch.is_autocast_enabled(device)`` said before: checkpoints that somebody has written for older
versions of torch do so. Where functions cast to half our casts go off and on, in this thread.
Knows the mode of the thread and what `autocast_questions` answers; knows nothing of casts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import Function
from .autocast_questions import dtype_of_casts, for_all_but_torch
from .mode import mode, process

# Nothing is replaced in the namespace of torch's C code.
_autocast_is_on = torch._C.is_autocast_enabled


def replacements() -> dict[str, Callable[[Function], Function]]:
    """Return, for each of them by its path, what makes its replacement."""
    return {f"torch.{name}": make for name, make in _SETTERS.items() if hasattr(torch, name)}


def _switching(device: str, original: Function) -> Function:
    """Switch casts with torch's own autocast, which stays off where they answer in its place.

    Args:
        device: that is meant where the call names none; "" means any whose tensors are cast.
        original: torch's.
    """

    def set_enabled(*args: Any, **kwargs: Any) -> None:
        kind, enabled = _given(device, "enabled", args, kwargs)
        if not isinstance(kind, str) or not (enabled is True or enabled is False):
            original(*args, **kwargs)  # which refuses it
        elif enabled:
            _switch_on(kind, original, args, kwargs)
        else:
            was_on = _autocast_is_on(kind or "cuda")
            original(*args, **kwargs)
            if dtype_of_casts(kind) is not None:
                mode.switch_autocast_off(was_on)

    return for_all_but_torch(original, set_enabled, set_enabled, set_enabled)


def _switch_on(device: str, original: Function, args: Any, kwargs: Any) -> None:
    switched = mode.switch_autocast_on() if _is_cast(device) else None
    if dtype_of_casts(device) is None or (switched is not None and switched.torchs):
        original(*args, **kwargs)


def _setting(device: str | None, original: Function) -> Function:
    """Set the dtype of torch's own autocast, but to what our casts have answered, or answer now."""

    def set_dtype(*args: Any, **kwargs: Any) -> None:
        kind, dtype = _given(device, "dtype", args, kwargs)
        if not isinstance(kind, str) or dtype is None or dtype is not _answered(kind):
            original(*args, **kwargs)

    return for_all_but_torch(original, set_dtype, set_dtype, set_dtype)


def _given(
    device: str | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the device and the value of a call: the device comes first, or not at all."""
    values = [*args, *[kwargs[key] for key in ("device_type", name) if key in kwargs]]
    known = len(values) == len(args) + len(kwargs)
    if known and len(values) == 2:
        return values[0], values[1]
    return (device, values[0]) if known and len(values) == 1 else (None, None)


def _is_cast(device: str) -> bool:
    return not device or device.partition(":")[0] in process.devices


def _answered(device: str) -> torch.dtype | None:
    """Return `dtype_of_casts`; where these were switched off here, as it was before."""
    off = mode.autocast_off
    if off is None or off.torchs or not _is_cast(device):
        return dtype_of_casts(device)
    region: Any = off.saved.region
    answered: torch.dtype = region.dtype if region is not None else mode.level or process.dtype
    return answered


_SETTERS: dict[str, Callable[[Function], Function]] = {
    "set_autocast_enabled": functools.partial(_switching, ""),
    "set_autocast_cpu_enabled": functools.partial(_switching, "cpu"),
    "set_autocast_dtype": functools.partial(_setting, None),
    "set_autocast_gpu_dtype": functools.partial(_setting, ""),
    "set_autocast_cpu_dtype": functools.partial(_setting, "cpu"),
}
