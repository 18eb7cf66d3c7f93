"""Which module of a model an exception comes from, and which tensors were at hand there.

Knows models and tracebacks; nothing of what is at fault.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from amp_patch.levels import OptLevel

#: Operands that are listed.
_MOST_OPERANDS = 6


class Place(NamedTuple):
    """Where an exception comes from: the module that ran, its path, its model and the level.

    Attributes:
        stranger: the innermost module that this one called, and that is no part of the model.
    """

    module: nn.Module
    path: str
    model: nn.Module
    level: OptLevel
    frame: types.FrameType
    stranger: nn.Module | None = None


def innermost(error: BaseException, levels: Mapping[nn.Module, OptLevel]) -> Place | None:
    """Return the innermost module of these models whose code the exception went through.

    One that is no part of a model, and has its parameters, stands for the part that has them.
    """
    names: dict[int, tuple[str, nn.Module, OptLevel]] = {}
    for model, level in levels.items():
        for name, module in model.named_modules():
            names.setdefault(id(module), (name, model, level))
            for param in _own_parameters(module):
                names.setdefault(id(param), (name, model, level))
    found = None
    for frame in frames(error):
        module = owner_of(frame)
        if not isinstance(module, nn.Module) or _is_calling(frame):
            continue
        keys = map(id, (module, *_own_parameters(module)))
        known = next((names[key] for key in keys if key in names), None)
        if known is not None:
            found = Place(module, *known, frame)
        elif found is not None:
            found = found._replace(stranger=module)
    return found


def _own_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module itself; a layer without a bias has None in its place."""
    return [param for param in module._parameters.values() if param is not None]


def owner_of(frame: types.FrameType) -> Any:
    """Return the object whose method runs in a frame; None where it is no method."""
    code = frame.f_code
    if "self" in frame.f_locals or not code.co_argcount:
        return frame.f_locals.get("self")
    first = frame.f_locals.get(code.co_varnames[0])  # a method's own name for it, or an argument
    method = getattr(type(first), code.co_name, None)
    return first if getattr(method, "__code__", None) is code else None


def frames(error: BaseException) -> Iterator[types.FrameType]:
    """Yield the frames that an exception went through, the outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_calling(frame: types.FrameType) -> bool:
    """Tell whether a frame is of what calls a module, and not of its forward."""
    return frame.f_code.co_filename == nn.modules.module.__file__


def operands(place: Place) -> list[tuple[str, Tensor]]:
    """Return the floating tensors at hand: the module's own, and the variables of its forward."""
    own = {**place.module._parameters, **place.module._buffers}
    own_ids = set(map(id, own.values()))
    found = {
        **{name: value for name, value in place.frame.f_locals.items() if id(value) not in own_ids},
        **{f"self.{name}": value for name, value in own.items()},
    }
    floats = (
        one for one in found.items() if isinstance(one[1], Tensor) and one[1].is_floating_point()
    )
    return list(floats)[:_MOST_OPERANDS]


def is_within(model: nn.Module, frame: types.FrameType) -> bool:
    """Tell whether a frame is of a method of the model, or of a part of it."""
    owner = None if _is_calling(frame) else owner_of(frame)
    return isinstance(owner, nn.Module) and any(owner is module for module in model.modules())
