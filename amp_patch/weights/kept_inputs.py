"""Which arguments of a model's call are left as they are, because a rule names them.

As targets with coordinates, which half precision would round. Knows the arguments of functions;
not how the others are cast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from amp_patch.did_you_mean import did_you_mean, meant

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find(models: Sequence[nn.Module], rules: Mapping[str, str]) -> list[frozenset[str]]:
    """Return, for each model, the names of arguments that its call leaves as they are.

    Args:
        models: whose ``forward`` has the arguments.
        rules: name of an argument -> "off".

    Raises:
        ValueError: a rule names no argument of any of these models.
    """
    found = [frozenset(name for name in rules if _takes(model, name)) for model in models]
    known = frozenset[str]().union(*found)
    for name in rules:
        if models and name not in known:
            raise ValueError(_unknown(name, models))
    return found


def places(
    function: Callable[..., Any], names: Collection[str], has_self: bool = False
) -> frozenset[int]:
    """Return the places of named arguments in a call by place.

    Args:
        function: takes them.
        names: of these; others are passed over.
        has_self: whether its first argument is the model, and has no place.
    """
    params = [one for one in _params(function) if one.kind in _BY_PLACE][has_self:] if names else []
    return frozenset(place for place, one in enumerate(params) if one.name in names)


def names_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of what a function can be given by name; not what it collects."""
    return [one.name for one in _params(function) if one.kind in _BY_NAME]


def _takes(model: nn.Module, name: str) -> bool:
    if name in names_of(model.forward):
        return True
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in _params(model.forward))


def _params(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # none that Python knows
        return []


def _unknown(name: str, models: Sequence[nn.Module]) -> str:
    named = [known for model in models for known in names_of(model.forward)]
    listed = ", ".join(dict.fromkeys(map(repr, named)))
    example = meant(name, named) or (named or ["targets"])[-1]
    return (
        f"inputs in rules must be named as arguments of the model's forward ({listed or 'none'}); "
        f"got {name!r}{did_you_mean(name, named)} Call amp.initialize(..., "
        f"rules={{'inputs': {{{example!r}: 'off'}}}})."
    )
