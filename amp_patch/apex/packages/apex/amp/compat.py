"""Names of apex's module of the same name; today's torch needs none of what it did."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = [
    "filter_attrs",
    "is_floating_point",
    "is_tensor_like",
    "scalar_python_val",
    "tensor_is_float_tensor",
    "tensor_is_variable",
    "variable_is_tensor",
]


def variable_is_tensor() -> bool:
    """Return True."""
    return True


def tensor_is_variable() -> bool:
    """Return True."""
    return True


def tensor_is_float_tensor() -> bool:
    """Return False: torch.Tensor is no torch.FloatTensor."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Return whether it is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: torch.Tensor) -> bool:
    """Return whether a tensor holds floating numbers."""
    return x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """Return a tensor of one element as a Python number."""
    return x.item() if isinstance(x, torch.Tensor) else x[0]


def filter_attrs(module: Any, attrs: list[str]) -> list[str]:
    """Return the names that a module has."""
    return list(filter(functools.partial(hasattr, module), attrs))
