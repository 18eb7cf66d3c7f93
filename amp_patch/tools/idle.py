"""Whether a script, one of whose processes was told to end, does nothing but wait for that one.

A script that trains in a process of its own may wait for what that was to hand over: it would wait
for ever. Knows processes by what the system tells of them in ``/proc``; elsewhere none is idle.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .attach import options

#: The file that notes it, in the folder that the tool writes to.
NAME = "told-to-end"
#: Seconds that a script gets to do anything.
GRACE = 10.0
#: The share of a processor that one who waits may take: he may look every now and then.
_LITTLE = 0.02


def note_end() -> None:
    """Note, in a process of the script, that it was told to end."""
    with contextlib.suppress(KeyError, OSError):  # no command waits for it
        Path(options()["out"], NAME).touch()


class Descendant(NamedTuple):
    """A process, and what the system tells of it.

    Attributes:
        number: its id.
        group: its process group.
        seconds: of processors that it has taken.
    """

    number: int
    group: int
    seconds: float


def descendants(process: int) -> Iterator[Descendant]:
    """Yield the process that began a script, and all that those have started which live."""
    ticks = os.sysconf("SC_CLK_TCK")
    known: dict[int, tuple[int, Descendant]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # number (name) state parent group ...; the name may hold anything
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            number, seconds = int(path.parent.name), (int(fields[11]) + int(fields[12])) / ticks
            known[number] = int(fields[1]), Descendant(number, int(fields[2]), seconds)
    found, new = set[int](), {process}
    while new:
        yield from (known[one][1] for one in new if one in known)
        found |= new
        new = {one for one, (parent, _) in known.items() if parent in found} - found


class IdleWatch:
    """Looks at the processes of a script, again and again.

    Args:
        process: that began it.
        folder: that the tool writes to.
    """

    def __init__(self, process: int, folder: Path) -> None:
        self._process, self._note = process, folder / NAME
        self._since, self._taken = 0.0, -1.0

    def is_idle(self) -> bool:
        """Return whether the script only waits, for as long as it may, after it was told to end."""
        if not self._note.exists():
            return False
        now, taken = time.monotonic(), sum(one.seconds for one in descendants(self._process))
        # fewer seconds than before: one of the processes has ended
        if not self._taken <= taken <= self._taken + _LITTLE * GRACE:
            self._since, self._taken = now, taken
        return now - self._since > GRACE
