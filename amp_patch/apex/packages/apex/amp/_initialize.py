"""What scripts import of apex's set-up; the set-up is amp_patch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_patch.arguments import models_of, optimizers_of
from amp_patch.casting.nested import map_tensors
from amp_patch.weights.half_model import cast_floats

__all__ = [
    "O2StateDictHook",
    "applier",
    "check_models",
    "check_optimizers",
    "check_params_fp32",
    "to_type",
]


def applier(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a tensor, or what holds some, with ``fn`` applied to each tensor.

    Containers keep their type. Other objects are given to ``fn`` where they have a method ``to``.
    """
    return map_tensors(fn, value, other=lambda item: fn(item) if hasattr(item, "to") else item)


def to_type(dtype: torch.dtype, t: Any) -> Any:
    """Return a tensor, or what holds some, with floating values in ``dtype``."""
    return cast_floats(t, dtype)


class O2StateDictHook:
    """A hook of ``model.state_dict()`` that gives half values in fp32.

    Scripts look for it, to take it off: a model of `initialize` has none, and saves its masters.

    Args:
        fn: not used.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Cast the entries of a state dict in place."""
        for name, value in state_dict.items():
            state_dict[name] = cast_floats(value, torch.float32)


def check_models(models: Any) -> None:
    """Raise for what `initialize` refuses as a model; see `amp_patch.amp.initialize`."""
    models_of(models, allow_half=True)


def check_params_fp32(models: Any) -> None:
    """Raise for models with half parameters or buffers."""
    models_of(models)


def check_optimizers(optimizers: Any) -> None:
    """Raise for what `initialize` refuses as an optimizer."""
    optimizers_of(optimizers)
