"""Casts around torch's functions (O1, O4), the cache of weight casts, and regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What a wrapper calls, and a wrapper itself.
Function = Callable[..., Any]
#: Its positional arguments.
Args = tuple[Any, ...]
