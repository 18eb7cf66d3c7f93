"""What a tool has left to do when a process ends, also where ``os._exit`` ends it.

Python calls no exit handlers then. A script may end so by itself, and so ends each process that
`multiprocessing` has forked. Imports no torch.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import NoReturn

from amp_patch.patching import Patches


class _Handler:
    """Calls a function once, whoever asks for it first.

    Attributes:
        process: that has registered it. A fork of it inherits the handler, and not the duty.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._was_called = function, False
        self.process = os.getpid()

    def __call__(self) -> None:
        if not self._was_called:
            self._was_called = True
            self._function()


_handlers: list[_Handler] = []
_patches = Patches()


def at_end(function: Callable[[], None]) -> None:
    """Call a function when this process ends; the last one that is given is the first called."""
    if not _patches:
        _replace_exit()
    _handlers.append(_Handler(function))
    atexit.register(_handlers[-1])


def _replace_exit() -> None:
    original = os._exit

    @functools.wraps(original)
    def _exit(status: int) -> NoReturn:
        try:
            for handler in reversed(_handlers):
                if handler.process == os.getpid():
                    handler()
        finally:
            original(status)

    _patches.replace(os, "_exit", _exit)
