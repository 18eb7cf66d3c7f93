"""What torch.jit compiled gets float32 where its weights are float32, or where dtypes are mixed.

It calls operators by other names than ours, so nothing in it casts, and most of them take one
dtype alone. Knows how torch calls compiled functions and methods, and where they keep weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from amp_patch.levels import HALVES

from .argument_casts import is_half, is_on_cast_device, need_no_cast, tensors_in, to_float
from .mode import casts_are_on


def _compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call what torch.jit compiled; half tensors among the arguments become float32 if need be."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if casts_are_on() and (kwargs or not need_no_cast(args, HALVES)):
            given = tensors_in((args, kwargs))
            if any(map(is_half, given)) and (_hold_float(given) or _has_float_weights(self)):
                return _call_in_float(original, self, given, args, kwargs)
        return original(self, *args, **kwargs)

    return call


def _call_in_float(
    original: Callable[..., Any], compiled: Any, given: list[Tensor], args: Any, kwargs: Any
) -> Any:
    """Call it with half tensors in float32, and write to them what it wrote to their casts."""
    if is_compiling():  # torch.compile cannot ask whether a tensor was written to
        return original(compiled, *to_float(args), **to_float(kwargs))
    with torch.inference_mode(False):  # inside of which tensors do not count writes
        args, kwargs = to_float((args, kwargs))
    found = original(compiled, *args, **kwargs)
    _write_back(given, tensors_in((args, kwargs)))
    return found


def _write_back(given: Iterable[Tensor], wide: Iterable[Tensor]) -> None:
    """Write to half tensors what was written to their casts in place, if anything was."""
    for half, cast in zip(given, wide, strict=True):
        if cast is not half and cast._version:
            half.copy_(cast)


def _hold_float(tensors: Iterable[Tensor]) -> bool:
    """Tell whether one is float32; a tensor of no dimensions decides no dtype in torch either."""
    return any(
        tensor.dtype is torch.float32 and tensor.dim() > 0 and is_on_cast_device(tensor)
        for tensor in tensors
    )


def _has_float_weights(compiled: Any) -> bool:
    """Tell whether it is a method of a module whose weights are float32, and none is half."""
    if not isinstance(compiled, torch._C.ScriptMethod):
        return False
    weights = [*_weights(compiled.owner)]
    return _hold_float(weights) and not any(map(is_half, weights))


def _weights(module: Any) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a compiled module, as torch keeps it in C++."""
    kinds: Any = torch._C.ParameterDict, torch._C.BufferDict  # whose items torch's stubs lack
    for kind in kinds:
        yield from (tensor for _, tensor in kind(module).items())
    children: Any = torch._C.ModuleDict(module)
    for _, child in children.items():
        yield from _weights(child)


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch._C.ScriptFunction.__call__": _compiled,
    "torch._C.ScriptMethod.__call__": _compiled,
}
