"""Which arguments of a model's call, or parts of one, are left as they are, because a rule says so.

As targets with coordinates, which half precision would round. A rule's name is that of an argument
(``targets``), or leads into one by keys and attributes (``batch.boxes``). Knows the arguments of
functions; not how the others are cast.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from amp_patch.common.did_you_mean import did_you_mean, meant

#: Classes of other libraries -> the argument of their forward that boxes come in.
_BOXES = {
    "torchvision.models.detection.fcos.FCOS": "targets",
    "torchvision.models.detection.generalized_rcnn.GeneralizedRCNN": "targets",
    "torchvision.models.detection.retinanet.RetinaNet": "targets",
    "torchvision.models.detection.ssd.SSD": "targets",
}
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find(models: Sequence[nn.Module], rules: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return, for each model, the names of what its call leaves as it is.

    Boxes that a detector of torchvision gets are among them without a rule.

    Args:
        models: whose ``forward`` has the arguments.
        rules: name of an argument, or of a part of one -> "off".

    Raises:
        ValueError: a rule names no argument of any of these models.
    """
    found = [tuple(name for name in rules if _takes(model, name)) for model in models]
    known = {*chain.from_iterable(found)}
    for name in rules:
        if models and name not in known:
            raise ValueError(_unknown(name, models))
    return [
        (*names, *(set(_boxes_of(model)) - set(names)))
        for model, names in zip(models, found, strict=True)
    ]


def _boxes_of(model: nn.Module) -> Iterator[str]:
    """Yield the argument that boxes come in, where a class that is known for one has forward."""
    owner = getattr(forward_of(model), "__self__", model)
    for kind in type(owner).__mro__:
        path = f"{kind.__module__}.{kind.__qualname__}"
        if path in _BOXES:
            yield _BOXES[path]


def places(
    function: Callable[..., Any], names: Collection[str], has_self: bool = False
) -> tuple[tuple[int, str], ...]:
    """Return where arguments are in a call by place, each with the part of it that is meant.

    Args:
        function: takes them.
        names: of these; others are passed over.
        has_self: whether its first argument is the model, and has no place.

    Returns:
        Places with the names within, which are empty for all of an argument.
    """
    at = {name: at for at, name in enumerate(by_place(function)[has_self:])} if names else {}
    split = [name.partition(".") for name in names]
    return tuple((at[name], part) for name, _, part in split if name in at)


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the forward whose arguments a call of a model has.

    Another module's where the model is a wrapper of it that hands on what it is called with, as
    one of `torch.compile` or of an adapter.
    """
    kinds = {one.kind for one in _params(model.forward)}
    children = list(model.children())
    hands_on = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return forward_of(children[0]) if hands_on and len(children) == 1 else model.forward


def by_place(function: Callable[..., Any]) -> list[str]:
    """Return the names of what a function can be given by place, in their order."""
    return [one.name for one in _params(function) if one.kind in _BY_PLACE]


def names_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of what a function can be given by name; not what it collects."""
    return [one.name for one in _params(function) if one.kind in _BY_NAME]


def put_back(cast: Any, given: Any, part: str) -> Any:
    """Return what a cast made of a value, with a part of it as it was given.

    Args:
        cast: made of ``given``, and written to; or the very object, which is left alone.
        given: is left alone.
        part: names of keys, attributes or fields with dots between; all of it if empty. It is
            looked for in each item of a list or a tuple, and passed over where there is none.
    """
    if not part:
        return given
    if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
        items = [put_back(*pair, part) for pair in zip(cast, given, strict=True)]
        if isinstance(given, tuple):
            return tuple.__new__(type(cast), items)
        for place, item in enumerate(items):
            if item is not cast[place]:
                cast[place] = item
        return cast
    for name, inner in _ways_into(given, part):
        item = _item(cast, name)
        kept = put_back(item, _item(given, name), inner)
        if kept is not item:  # else it was written to; a graph's view of its features cannot be set
            cast = _with_item(cast, name, kept)
    return cast


def has_part(value: Any, part: str) -> bool:
    """Tell whether there is what `put_back` would look for."""
    if not part:
        return True
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return any(has_part(item, part) for item in value)
    return any(has_part(_item(value, name), inner) for name, inner in _ways_into(value, part))


def _ways_into(value: Any, part: str) -> Iterator[tuple[str, str]]:
    """Yield the first name of a part that a value has, and the rest; a key may have dots itself."""
    if isinstance(value, Tensor):  # whose attributes are none of a batch's
        return
    names = part.split(".")
    for count in range(len(names), 0, -1):
        name = ".".join(names[:count])
        if name in value if isinstance(value, Mapping) else hasattr(value, name):
            yield name, ".".join(names[count:])


def _item(value: Any, name: str) -> Any:
    return value[name] if isinstance(value, Mapping) else getattr(value, name)


def _with_item(value: Any, name: str, item: Any) -> Any:
    if isinstance(value, tuple):
        return value._replace(**{name: item})  # type: ignore[attr-defined]  # a named one
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, name: item})  # type: ignore[call-arg]  # MappingProxyType
    if isinstance(value, MutableMapping):
        value[name] = item
        return value
    new = copy.copy(value)
    if dataclasses.is_dataclass(new):
        object.__setattr__(new, name, item)  # one that is frozen refuses setattr
    else:
        setattr(new, name, item)
    return new


def _takes(model: nn.Module, name: str) -> bool:
    forward, parts = forward_of(model), name.split(".")
    if not all(parts):  # a dot too many
        return False
    if parts[0] in names_of(forward):
        return True
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in _params(forward))


def _params(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # none that Python knows
        return []


def _unknown(name: str, models: Sequence[nn.Module]) -> str:
    named = [known for model in models for known in names_of(forward_of(model))]
    listed = ", ".join(dict.fromkeys(map(repr, named)))
    argument, *parts = name.split(".")
    first = meant(argument, named) or (named or ["targets"])[-1]
    example = ".".join([first, *filter(None, parts)])
    return (
        f"inputs in rules must be named as arguments of the model's forward ({listed or 'none'}); "
        f"got {name!r}{did_you_mean(argument, named)} Call amp.initialize(..., "
        f"rules={{'inputs': {{{example!r}: 'off'}}}})."
    )
