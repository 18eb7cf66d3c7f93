"""Which tensors of a call's arguments are cast, and their casts.

Those of 32 and 16 bits on the devices of the models are; float64, complex and integer ones never.
Knows nothing of functions, rules or modes of threads.

What a model gets and returns at O2, O3 and O5 is cast elsewhere (`half_model.cast_floats`), for
there the device does not matter, and objects that are no containers convert themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from amp_patch.levels import HALVES

from .mode import FLOATS, process
from .nested import map_tensors
from .shared_casts import CAST

CastTensor = Callable[[Any, torch.dtype], Any]

_CONTAINERS = (list, tuple, dict)


def to_dtype(
    value: Any,
    dtype: torch.dtype,
    weight: CastTensor | None = None,
    activation: CastTensor | None = None,
) -> Any:
    """Return ``value`` with floating tensors, also in containers, cast to ``dtype``.

    float64, complex and integer tensors, and tensors on other devices than the models', stay.

    Args:
        value: any argument of a patched function.
        dtype: a half dtype, or float32.
        weight: casts parameters in its place, given one and the dtype.
        activation: casts other plain tensors in its place, where they are to be cast.
    """
    if isinstance(value, Tensor):
        if weight is not None and type(value) is Parameter:
            return weight(value, dtype)
        found = value.dtype
        if found is dtype or found not in FLOATS or not is_on_cast_device(value):
            return value
        if value.is_sparse and value.requires_grad:
            return _with_cast_values(value, dtype)
        if type(value) is Tensor:
            return (activation or _cast)(value, dtype)
        return value if is_made_later(value) else value.to(dtype)
    if isinstance(value, _CONTAINERS) and not _has_no_tensor(value):
        return map_tensors(lambda tensor: to_dtype(tensor, dtype, weight, activation), value)
    return value


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return CAST[dtype](value)


def _with_cast_values(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sparse COO tensor with its values cast.

    The backward of a cast of the tensor itself refuses the strided gradient that products give.
    """
    rows = matrix.coalesce()
    return torch.sparse_coo_tensor(
        rows.indices(), rows.values().to(dtype), rows.shape, is_coalesced=True
    )


def is_made_later(value: Tensor) -> bool:
    """Tell one of ``torch.nn.attention.bias``: it has no numbers, and a cast of it not even a size.

    Attention makes its numbers, in the dtype of the query.
    """
    return type(value).__module__ == "torch.nn.attention.bias"


def is_on_cast_device(tensor: Tensor) -> bool:
    """Tell whether the tensor is on a device of the models', whose tensors are cast."""
    # Of the devices most in use; to ask for the type of any costs the host five times as much.
    # In a backward that torch 2.6 traces it refuses these questions, but not the type.
    if is_dynamo_compiling():
        return tensor.device.type in process.devices
    if tensor.is_cpu:
        return "cpu" in process.devices
    return ("cuda" if tensor.is_cuda else tensor.device.type) in process.devices


def need_no_cast(values: Iterable[Any], others: Collection[torch.dtype]) -> bool:
    """Tell whether no value is or holds a tensor of ``others``, as most often at a second look.

    False also for what would have to be looked into.
    """
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.dtype in others:
                return False
        elif kind not in _PLAIN and not (kind is tuple and _INTS.issuperset(map(type, value))):
            return False
    return True


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})
_INTS = frozenset({int})


def to_float(value: Any) -> Any:
    """Return ``value`` with half tensors, also in containers, cast to fp32."""
    if isinstance(value, Tensor):
        if value.dtype not in HALVES or not is_on_cast_device(value):
            return value
        if value.is_sparse and value.requires_grad:
            return _with_cast_values(value, torch.float32)
        return value.float()
    if isinstance(value, _CONTAINERS) and not _has_no_tensor(value):
        return map_tensors(to_float, value)
    return value


def _has_no_tensor(value: Any) -> bool:
    """Tell of a list of dimensions, or of a scale of each, that there is nothing to be cast.

    False also of what would have to be looked into.
    """
    is_list = type(value) is list or type(value) is tuple
    return is_list and not is_dynamo_compiling() and _PLAIN.issuperset(map(type, value))


def float_on_cpu(value: Any) -> Any:
    """Return ``value`` with half tensors on the CPU cast to fp32."""
    if isinstance(value, Tensor):
        return to_float(value) if value.device.type == "cpu" else value
    if isinstance(value, _CONTAINERS):
        return map_tensors(float_on_cpu, value)
    return value


def is_half(value: Any) -> bool:
    """Tell whether a value is a tensor that `to_float` casts."""
    return isinstance(value, Tensor) and value.dtype in HALVES and is_on_cast_device(value)


def holds_half(values: Iterable[Any]) -> bool:
    """Tell whether one of the values is such a tensor; containers are not looked into."""
    return any(map(is_half, values))


def is_sparse_on_cpu(value: Any) -> bool:
    """Tell a sparse matrix for whose products torch has no half kernel."""
    return isinstance(value, Tensor) and value.layout is not torch.strided and value.is_cpu


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, of every dtype and device, in their order."""
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
        if tensor.dtype in FLOATS and is_on_cast_device(tensor)
    ]
