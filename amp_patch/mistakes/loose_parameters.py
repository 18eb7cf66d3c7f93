"""Parameters that no module of a model has, at hand where an exception comes from.

One in a plain list, dict or object of the script's is in no ``model.parameters()``: an optimizer
trains it where it is named, and nobody stores it in half. Knows frames; nothing of what mends it.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from amp_patch.casting.mode import FLOATS
from amp_patch.casting.nested import items_of

from .error_places import Place, frames, owner_of

#: A dict of lists, say; deeper ones, and what holds itself, are not looked through.
_DEPTH = 3
#: Nor are further ones of each: a vocabulary may have a million.
_ITEMS = 100
_OURS = f"{__name__.partition('.')[0]}."


def loose_parameter(place: Place, error: BaseException) -> tuple[str, Tensor] | None:
    """Return one that what ran may have used, not in the dtype that a level stores; or None.

    Returns:
        What it is said to be held by, and the parameter.
    """
    own = set(map(id, place.model.parameters()))
    every = list(frames(error))
    for frame in every[every.index(place.frame) :]:
        for name, value in _at_hand(frame):
            for tensor in _tensors_in(value):
                is_loose = isinstance(tensor, nn.Parameter) and id(tensor) not in own
                if is_loose and tensor.dtype in set(FLOATS) - {place.level.cast_model_type}:
                    return name, tensor
    return None


def _at_hand(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of its owner that a function's code names, and then its variables."""
    if frame.f_globals.get("__name__", "").startswith(_OURS):  # what a function of torch was given
        yield from (("an argument", value) for value in frame.f_locals.values())
        return
    held = getattr(owner_of(frame), "__dict__", {})
    for name in frame.f_code.co_names:
        if name in held:
            yield repr(f"self.{name}"), held[name]
    yield from ((repr(name), value) for name, value in frame.f_locals.items())


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a container, of containers too; a module keeps its own."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module) and not _is_lazy(value):
        for _, item in itertools.islice(items_of(value), _ITEMS):
            yield from _tensors_in(item, depth - 1)


def _is_lazy(value: Any) -> bool:
    """Return whether a mapping may make or read what it is asked for."""
    return isinstance(value, Mapping) and not isinstance(value, dict)
