"""Warnings that are given once per session; knows nothing of what they warn of."""

from __future__ import annotations

import warnings


class WarnOnce:
    """Warns of each message the first time, and again after a `reset`."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless that was done."""
        if message not in self._given:
            self._given.add(message)
            warnings.warn(message, stacklevel=2)

    def reset(self) -> None:
        """Forget what was warned of: a session ends."""
        self._given.clear()


warn_once = WarnOnce()
