"""Makes a list of one thing or several, and says what is given in the place of another kind."""

from __future__ import annotations

from typing import Any


def as_list(given: Any) -> list[Any]:
    """Return one thing, or a list or tuple of things, as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def described(item: Any, kind: type) -> str:
    """Return the type of what is not of a kind, and where it holds one, as wrappers do."""
    got = type(item)
    # fastai has an Optimizer of its own
    name = f"{got.__module__}.{got.__name__}" if got.__name__ == kind.__name__ else got.__name__
    held = (key for key, value in getattr(item, "__dict__", {}).items() if isinstance(value, kind))
    attribute = next(held, None)
    return name if attribute is None else f"{name}, which holds one to pass: its .{attribute}"
