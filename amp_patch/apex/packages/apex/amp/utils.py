"""Small functions on tensors that scripts import from apex.amp.utils."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.patching import Patches
from amp_patch.session import session
from amp_patch.weights.half_model import cast_floats

__all__ = [
    "as_inplace",
    "casted_args",
    "collect_fp_tensor_types",
    "get_cuda_version",
    "get_func",
    "get_func_names",
    "has_func",
    "is_cuda_enabled",
    "is_fp_tensor",
    "is_nested",
    "iter_params",
    "maybe_float",
    "maybe_half",
    "set_func",
    "type_string",
]


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for; empty without CUDA."""
    return tuple(map(int, torch.version.cuda.split("."))) if torch.version.cuda else ()


def is_cuda_enabled() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def is_fp_tensor(x: Any) -> bool:
    """Return whether it is a floating tensor, or a list or tuple of such only."""
    if is_nested(x):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()


def is_nested(x: Any) -> bool:
    """Return whether it is a list or tuple."""
    return isinstance(x, (list, tuple))


def type_string(x: Tensor) -> str:
    """Return 'HalfTensor', 'FloatTensor' ..."""
    return x.type().rpartition(".")[2]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return it with floating tensors in fp16; float64 stays."""
    return cast_floats(x, torch.float16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return it with half tensors in fp32."""
    return cast_floats(x, torch.float32)


def casted_args(cast_fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments cast; ``kwargs`` is changed in place, as in apex."""
    kwargs.update({name: cast_fn(value) for name, value in kwargs.items() if is_fp_tensor(value)})
    return [cast_fn(value) if is_fp_tensor(value) else value for value in args]


def collect_fp_tensor_types(args: Sequence[Any], kwargs: dict[str, Any]) -> set[str]:
    """Return the type strings of all floating tensors among the arguments."""
    found: set[str] = set()
    for value in itertools.chain(args, kwargs.values()):
        if is_nested(value):
            found |= collect_fp_tensor_types(value, {})
        elif is_fp_tensor(value):
            found.add(type_string(value))
    return found


def as_inplace(fns: Sequence[str]) -> list[str]:
    """Return names with an underscore."""
    return [f"{name}_" for name in fns]


def has_func(mod: Any, fn: str) -> bool:
    """Return whether a module, or a dict, has a function."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    """Return a function of a module or of a dict."""
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def get_func_names(mod: Any) -> list[str]:
    """Return the names in a module or a dict."""
    return list(mod) if isinstance(mod, dict) else dir(mod)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    """Set a function of a module, until `amp.deactivate`, or of a dict."""
    if isinstance(mod, dict):
        mod[fn] = new_fn
        return
    patches = Patches()
    patches.replace(mod, fn, new_fn)
    session.call_at_deactivate(patches.undo)


def iter_params(x: Any) -> Any:
    """Yield the tensors of a list or tuple, or the tensor itself."""
    if is_nested(x):
        for item in x:
            yield from iter_params(item)
    else:
        yield x
