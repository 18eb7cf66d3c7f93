"""Which tensors of a call's arguments are cast, and their casts.

Those of 32 and 16 bits on the devices of the models are; float64, complex and integer ones never.
Knows nothing of functions, rules or modes of threads.

What a model gets and returns at O2, O3 and O5 is cast elsewhere (`half_model.cast_floats`), for
there the device does not matter, and objects that are no containers convert themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .mode import FLOATS, HALVES, process
from .nested import map_tensors

CastWeight = Callable[[Parameter, torch.dtype], Any]

_CONTAINERS = (list, tuple, dict)


def to_dtype(value: Any, dtype: torch.dtype, weight: CastWeight | None = None) -> Any:
    """Return ``value`` with floating tensors, also in containers, cast to ``dtype``.

    float64, complex and integer tensors, and tensors on other devices than the models', stay.

    Args:
        value: any argument of a patched function.
        dtype: a half dtype, or float32.
        weight: casts parameters in its place, given one and the dtype.
    """
    if isinstance(value, Tensor):
        if weight is not None and type(value) is Parameter:
            return weight(value, dtype)
        found = value.dtype
        if found is dtype or found not in FLOATS or value.device.type not in process.devices:
            return value
        return value.to(dtype)
    if isinstance(value, _CONTAINERS):
        return map_tensors(lambda tensor: to_dtype(tensor, dtype, weight), value)
    return value


def to_float(value: Any) -> Any:
    """Return ``value`` with half tensors, also in containers, cast to fp32."""
    if isinstance(value, Tensor):
        if value.dtype in HALVES and value.device.type in process.devices:
            return value.float()
        return value
    if isinstance(value, _CONTAINERS):
        return map_tensors(to_float, value)
    return value


def float_on_cpu(value: Any) -> Any:
    """Return ``value`` with half tensors on the CPU cast to fp32."""
    if isinstance(value, Tensor):
        return to_float(value) if value.device.type == "cpu" else value
    if isinstance(value, _CONTAINERS):
        return map_tensors(float_on_cpu, value)
    return value


def is_half(value: Any) -> bool:
    """Tell whether a value is a tensor that `to_float` casts."""
    return (
        isinstance(value, Tensor) and value.dtype in HALVES and value.device.type in process.devices
    )


def holds_half(values: Iterable[Any]) -> bool:
    """Tell whether one of the values is such a tensor; containers are not looked into."""
    return any(is_half(value) for value in values)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, of every dtype and device."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def dtypes_in(value: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors in nested containers that a cast may touch."""
    return [
        tensor.dtype
        for tensor in tensors_in(value)
        if tensor.dtype in FLOATS and tensor.device.type in process.devices
    ]
