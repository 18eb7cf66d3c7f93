"""What calls by every rule share: their floating tensors, casts of arguments, and no others inside.

Knows nothing of rules and levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casting.argument_casts import is_on_cast_device, tensors_in, to_dtype
from amp_patch.casting.mode import FLOATS, mode
from amp_patch.casting.nested import map_tensors

Kwargs = Mapping[str, Any]

# a tuple, for torch 2.6 compiles no look into a set
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def floats_in(*values: Any) -> list[Tensor]:
    """Return the floating tensors that rules are about, also those in containers."""
    found: list[Tensor] = []
    _note_floats(values, found)
    return found


def _note_floats(values: Iterable[Any], found: list[Tensor]) -> None:
    # what arguments are most often is found here: to map them takes the host five times as long
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, Tensor):
            if _is_float(value):
                found.append(value)
        elif kind is tuple or kind is list:
            _note_floats(value, found)
        elif kind is dict:
            _note_floats(value.values(), found)
        elif not isinstance(value, nn.Module):  # whose method it is
            found.extend(filter(_is_float, tensors_in(value)))


def _is_float(tensor: Tensor) -> bool:
    known = tensor.dtype in FLOATS or tensor.dtype is torch.float64
    return known and is_on_cast_device(tensor)


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating tensors in a dtype; a module as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value if value.dtype is dtype else to_any(value, dtype)
    if isinstance(value, nn.Module):  # whose method it is
        return value
    return map_tensors(lambda tensor: to_any(tensor, dtype), value)


def map_call(
    function: Callable[[Any], Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, each as ``function`` returns it.

    To map the tuple and the dict as containers takes the host several times as long.
    """
    named = {name: function(one) for name, one in kwargs.items()} if kwargs else {}
    return (*map(function, args),), named


def to_any(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor, or a container of tensors, in a dtype, which may be float64."""
    return to_dtype(value, dtype, activation=Tensor.to)


class NothingElseCasts:
    """Let no cast of a level, region or rule act inside: arguments are in the dtype to run in.

    A class and no generator: torch 2.6 does not compile those.
    """

    def __enter__(self) -> None:
        self._saved, self._stored = mode.switch_off(), mode.stored
        mode.stored = None

    def __exit__(self, *error: object) -> None:
        mode.restore(self._saved)
        mode.stored = self._stored
