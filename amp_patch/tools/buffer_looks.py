"""Notes, in the script's process, which buffers of its models a training has made inf or NaN.

A loss need not tell: a training with running statistics that are inf goes on as one without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from amp_patch.debug.spoiled_buffers import SpoiledBuffer, SpoiledBuffers

from .recorded import SPOILED


class BufferLooks:
    """Looks at a training's end, and as often before as is cheap, for a model may not live so long.

    Args:
        write: gets a line for each buffer, once.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write, self._buffers = write, SpoiledBuffers()
        self._told: set[str] = set()
        self._steps = 0

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Look at models that were initialized; waits for their devices."""
        with contextlib.suppress(RuntimeError):  # what cannot be read is not looked at
            self._buffers.follow(models)

    def step(self) -> None:
        """A step is made: look after the 1st, 2nd, 4th, 8th and so on."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self.look()

    def look(self) -> None:
        """Write what is inf or NaN now; waits for the models' devices."""
        found: list[SpoiledBuffer] = []
        with contextlib.suppress(RuntimeError):  # of memory that was freed, or a device that failed
            found = self._buffers.found()
        for one in found:
            if one.title() not in self._told:
                self._told.add(one.title())
                self._write({SPOILED: one.title()})

    def look_at_end(self) -> None:
        """Look when the process ends; not where an error ends it, for devices may not answer."""
        if getattr(sys, "last_value", None) is None:
            self.look()
