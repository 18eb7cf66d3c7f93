"""Keeps a folder for one sweep: two would remove, and take for theirs, what the other recorded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from amp_patch.tools.errors import BadArguments

try:
    import fcntl
except ImportError:  # Windows has no such locks: nothing is kept there
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """Keeps a folder as long as this object lives, or its process, however that ends.

    Raises:
        BadArguments: another sweep has it.
    """

    def __init__(self, folder: Path) -> None:
        self._opened: int | None = None
        if fcntl is None or not folder.is_dir():
            return
        self._opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadArguments(
                f"a folder must hold one sweep at a time; got {folder}, in which another one runs; "
                "wait for its end, or name another folder"
            ) from error
        except OSError:  # not all file systems have locks
            pass

    def __del__(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(OSError):
                os.close(self._opened)
