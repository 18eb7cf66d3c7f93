"""What the tools share in the process of the user's script: their options, files by rank.

A tool is started there by `amp_patch/apex/startup/sitecustomize.py`, when the script imports
amp_patch or, through the drop-in, apex.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from amp_patch.distributed.process_groups import has_others, is_on, rank

from .at_end import at_end
from .attach import options as options
from .untrained import NAME


def begin(module: ModuleType) -> dict[str, Any]:
    """Return the options of a tool that is started, and note at the end what became of amp.

    Args:
        module: ``amp_patch.session``.
    """
    found = options()
    hear_sigint()
    lines = Lines(found["out"], NAME)
    at_end(lambda: lines.write({"amp": state_of(module.session)}))
    return found


def hear_sigint() -> None:
    """Let SIGINT interrupt, by which the command asks a script to end.

    A shell starts background jobs so that they ignore it, and a process inherits that.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def state_of(session: Any) -> str:
    """Return what became of amp in this process, as a key of `untrained.REASONS`."""
    return "yes" if session.initialized else "disabled" if session.lookup.disabled else "no"


def is_alone() -> bool:
    """Return whether no other process trains with this one, which would wait for it."""
    if is_on():
        return not has_others()
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


class Lines:
    """A file of JSON, one object a line, that can be read while it is written.

    It is made by the first write: processes that do not train (a data loader's) make none. A second
    process of the same rank writes to ``NAME-2``.

    Args:
        folder: there is one.
        name: without suffix; the rank is added.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        self._folder, self._name = Path(folder), name
        self._file: IO[str] | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Append one object, and hand it to the operating system at once."""
        if self._file is None:
            self._file = self._open()
            at_end(self.close)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> IO[str]:
        stem, number = f"{self._name}-rank{rank()}", 1
        while True:
            path = self._folder / f"{stem}{'' if number == 1 else f'-{number}'}.jsonl"
            try:
                return path.open("x", encoding="utf-8")
            except FileExistsError:
                number += 1
