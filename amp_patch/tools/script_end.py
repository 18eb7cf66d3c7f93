"""Ends the script that this process runs, whatever it does about it; imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

from .idle import note_end

#: Seconds that a script gets to end, once it was told to and does nothing but wait.
GRACE = 10.0


class ScriptEnd:
    """Ends the script when it is called, whatever becomes of what the first call raises.

    A script may catch it. Or it trains in a thread for whose results the main thread waits, or a
    thread of its own waits for steps that do not come: by itself it would never end.

    Attributes:
        was_called: once, so the script has gone on.
    """

    def __init__(self) -> None:
        self.was_called = self._is_over = False

    def __call__(self) -> NoReturn:
        """Raise SystemExit; see the class."""
        if self.was_called:
            sys.stdout.flush()
            if not self._is_over:  # else it is one of these functions that trains on
                self._is_over = True
                atexit._run_exitfuncs()
            os._exit(0)
        self.was_called = True
        note_end()
        is_main = threading.current_thread() is threading.main_thread()
        threading.Thread(target=_end_later, args=(is_main,), daemon=True).start()
        raise SystemExit(0)


def _end_later(is_main: bool) -> None:
    """End the process, if it does not end by itself.

    Args:
        is_main: it is the main thread that was told to, which has the time that it takes for that.
    """
    if is_main:
        threading.main_thread().join()
    time.sleep(GRACE)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)
