"""Which modules and functions are being called in this thread, as its stack says.

Ctrl-C ends a forward, and torch calls no hook then: what the hooks noted of modules may be stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from traceback import walk_stack
from types import CodeType
from typing import Any

from torch import nn


def called(self: nn.Module, run: Callable[[], Any]) -> Any:
    """Call a function that counts as a call of this module for as long as it takes."""
    return run()


_CALLS = (nn.Module._call_impl.__code__, called.__code__)


def running_modules() -> set[int]:
    """Return the ids of the modules whose ``__call__`` is on the stack, or `called`."""
    return {
        id(frame.f_locals["self"])
        for frame, _ in walk_stack(sys._getframe())
        if frame.f_code in _CALLS
    }


def calls_of(module: nn.Module) -> int:
    """Return how many calls of a module are on the stack, as of a tree that calls itself."""
    return sum(
        frame.f_code in _CALLS and frame.f_locals["self"] is module
        for frame, _ in walk_stack(sys._getframe())
    )


def is_called(code: CodeType) -> bool:
    """Return whether a call of the function of this code is on the stack."""
    return any(frame.f_code is code for frame, _ in walk_stack(sys._getframe()))
