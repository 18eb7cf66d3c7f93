"""Which modules and functions are being called in this thread, as its stack says.

Ctrl-C ends a forward, and torch calls no hook then: what the hooks noted of modules may be stale.
"""

from __future__ import annotations

import sys
from types import CodeType

from torch import nn

_CALL = nn.Module._call_impl.__code__


def running_modules() -> set[int]:
    """Return the ids of the modules whose calls are on the stack. Takes microseconds a frame."""
    found = set()
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found.add(id(frame.f_locals["self"]))
        frame = frame.f_back  # type: ignore[assignment]  # None above the first
    return found


def calls_of(module: nn.Module) -> int:
    """Return how many calls of a module are on the stack, as of a tree that calls itself."""
    found = 0
    frame = sys._getframe(1)
    while frame is not None:
        found += frame.f_code is _CALL and frame.f_locals["self"] is module
        frame = frame.f_back  # type: ignore[assignment]  # None above the first
    return found


def is_called(code: CodeType) -> bool:
    """Return whether a call of the function of this code is on the stack."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]  # None above the first
    return frame is not None
