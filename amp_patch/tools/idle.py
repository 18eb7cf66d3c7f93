"""Whether a script does nothing but wait for a process of its own that was told to end.

A script that trains in a process of `multiprocessing` may wait for what that was to hand over: it
would wait for ever. Knows processes by what the system tells of them in ``/proc``; elsewhere no
script is idle. Imports no torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .attach import options

#: What the files begin with that note it, in the folder that the tool writes to; the rest is the
#: process.
NAME = "told-to-end-"
#: Seconds that a script gets to do anything, and where others of its processes live, which may wait
#: for their data.
GRACE, GRACE_BESIDE_OTHERS = 10.0, 60.0
#: The share of a processor that a process may take which waits: it may look every now and then.
_LITTLE = 0.05
#: In the command of a process that multiprocessing itself has started.
_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def note_end() -> None:
    """Note that this process was told to end, if it is one that a script waits for."""
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(KeyError, OSError):  # no command waits for it
            Path(options()["out"], f"{NAME}{os.getpid()}").touch()


class Descendant(NamedTuple):
    """A process that lives, and what the system tells of it.

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
            if fields[0] != "Z":  # else it has ended, and its parent has not asked how
                known[number] = int(fields[1]), Descendant(number, int(fields[2]), seconds)
    found, new = set[int](), {process}
    while new:
        yield from (known[one][1] for one in new if one in known)
        found |= new
        new = {one for one, (parent, _) in known.items() if parent in found} - found


def _is_helper(process: int) -> bool:
    with contextlib.suppress(OSError):
        command = Path("/proc", str(process), "cmdline").read_bytes()
        return any(name in command for name in _HELPERS)
    return False


class IdleWatch:
    """Looks at the processes of a script, again and again.

    Args:
        process: that began it.
        folder: that the tool writes to.
    """

    def __init__(self, process: int, folder: Path) -> None:
        self._process, self._folder = process, folder
        self._since = 0.0
        self._taken: dict[int, float] = {}  # by each process until then, in seconds

    def is_idle(self) -> bool:
        """Return whether the script only waits, for as long as it may, for one that has ended."""
        told = {int(path.name.removeprefix(NAME)) for path in self._folder.glob(f"{NAME}*")}
        living = list(descendants(self._process)) if told else []
        now, taken = time.monotonic(), {one.number: one.seconds for one in living}
        is_waiting = bool(living) and told.isdisjoint(taken)
        most = _LITTLE * max(GRACE, now - self._since)
        if not (
            is_waiting
            and taken.keys() == self._taken.keys()
            and all(seconds - self._taken[one] <= most for one, seconds in taken.items())
        ):
            self._since, self._taken = now, taken
            return False
        is_alone = all(_is_helper(one) for one in taken if one != self._process)
        return now - self._since > (GRACE if is_alone else GRACE_BESIDE_OTHERS)
