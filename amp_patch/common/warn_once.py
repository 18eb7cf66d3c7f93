"""Warnings: each points at the user's line, and is given once per session.

Knows which files are not the user's; nothing of what is warned of.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from pathlib import Path

import torch
import wrapt

#: Where the frames lie that a warning does not point at: this package, and what calls it.
NOT_THE_USERS = (
    *(
        os.path.join(os.path.abspath(folder), "")
        for folder in (
            Path(__file__).parents[1],
            Path(torch.__file__).parent,
            Path(wrapt.__file__).parent,
        )
    ),
    os.path.abspath(contextlib.__file__),
)


def users_frame() -> types.FrameType:
    """Return the innermost frame outside of amp_patch and torch; the outermost if there is none."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_THE_USERS) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def warn(message: str) -> None:
    """Warn of ``message`` at the user's line, whatever lies between it and here."""
    frame = users_frame()
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__"),
        registry=names.setdefault("__warningregistry__", {}),
    )


class WarnOnce:
    """Warns of each message the first time, and again after a `reset`."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless that was done."""
        if message not in self._given:
            self._given.add(message)
            warn(message)

    def reset(self) -> None:
        """Forget what was warned of: a session ends."""
        self._given.clear()


warn_once = WarnOnce()
