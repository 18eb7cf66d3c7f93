"""A stand-in for a second device, for tests: tensors that say "meta", and have numbers yet.

Inside of `SecondDevice` a tensor that is made on, or moved to, the device "meta" keeps its numbers
in memory of the CPU. As between two GPUs, an operation that gets tensors of both devices raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

SECOND = torch.device("meta")


class _There(Tensor):
    """A tensor on the second device; ``here`` has its numbers, on the CPU."""

    __slots__ = ("here",)  # vars() of a parameter are copied to its master

    @staticmethod
    def __new__(cls, here: Tensor) -> _There:
        made = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=SECOND,
        )
        made.here = here
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.tolist:  # which torch makes of no subclass
            return args[0].here.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        if function == Tensor.data.__set__:  # torch sets the outer tensor alone
            param, value = args
            param.here = value.here
        return found

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """While it is entered there is a second device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the device that its tensors are on, or that it asks for."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    # as on a GPU, a number that is a tensor may come from the CPU
    devices = {one.device for one in tensors if one.dim() > 0 or isinstance(one, _There)}
    moves = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if len(devices) > 1 and not moves:
        raise RuntimeError(f"{function} got tensors on two devices, {devices}")
    asked = kwargs.get("device")
    there = tensors[:1] if function is torch.ops.aten.copy_.default else tensors
    is_there = (
        any(isinstance(one, _There) for one in there)
        if asked is None
        else (torch.device(asked) == SECOND)
    )
    here = {name: torch.device("cpu") if name == "device" else one for name, one in kwargs.items()}
    found = function(*tree_map(_here, args), **tree_map(_here, here))
    if not is_there:
        return found
    found = tree_map(lambda one: _There(one) if isinstance(one, Tensor) else one, found)
    return return_and_correct_aliasing(function, args, kwargs, found)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value
