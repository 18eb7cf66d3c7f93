"""Notes, in the process of a script, that it steps optimizers and has not begun to use amp.

Where that cannot be read off the script (`untrained`), a run would else come to its end before
anything is known. Whoever reads the note ends the script. Imports no torch by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

from .errors import BadArguments

#: The file in which it is noted, in the folder that the tool writes to.
NAME = "without-amp"
#: Steps without amp after which it is noted, so that it can be told.
STEPS = 20
#: Steps without amp after which it is noted again, so that the script can be ended; and the
#: variable of the environment that has another number, 0 for never.
MOST_STEPS = 200
VARIABLE = "AMP_PATCH_STEPS_BEFORE_AMP"


def most_steps() -> int:
    """Return how many steps a script may make before it uses amp; 0 for any number.

    Raises:
        BadArguments: the environment has no such number.
    """
    given = os.environ.get(VARIABLE) or str(MOST_STEPS)
    if not given.isdecimal():
        raise BadArguments(
            f"{VARIABLE} must be a number of optimizer steps, 0 for no limit; got {given!r}; unset "
            f"it for {MOST_STEPS}"
        )
    return int(given)


def watch(options: Mapping[str, Any]) -> None:
    """Count the steps of all optimizers, until amp is used or there are `most_steps`.

    Args:
        options: the tool's, of which "out" is the folder.
    """
    note = Path(options["out"], NAME)
    register_post_import_hook(lambda module: _Count(module, note), "torch.optim.optimizer")


class _Count:
    """The hook on the steps of all optimizers. It stays: torch runs through its hooks just then."""

    def __init__(self, module: Any, note: Path) -> None:
        self._note, self._steps, self._is_over = note, 0, False
        self._most = most_steps()
        self._last = max(STEPS, self._most)
        module.register_optimizer_step_post_hook(self)

    def __call__(self, *args: Any) -> None:
        if self._is_over:
            return
        self._steps += 1
        module = sys.modules.get("amp_patch.session")
        uses_amp = (
            module is not None and module.session.was_used and not module.session.lookup.disabled
        )
        self._is_over = uses_amp or self._steps == self._last
        if self._steps in (STEPS, self._most) and not uses_amp:
            self._write()

    def _write(self) -> None:
        """Write the number of steps, in one piece: several ranks write, and the command reads."""
        whole = self._note.with_name(f"{NAME}-{os.getpid()}")
        whole.write_text(str(self._steps), encoding="utf-8")
        whole.replace(self._note)
