"""Notes early, in the process of a script, that it steps optimizers and has not begun to use amp.

Where that cannot be read off the script (`untrained`), a run would else come to its end before
anything is known. Imports no torch by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

#: The file in which it is noted, in the folder that the tool writes to.
NAME = "without-amp"
#: Steps without amp after which it is noted.
STEPS = 20


def watch(options: str) -> None:
    """Count the steps of all optimizers, until amp is used or there are `STEPS`.

    Args:
        options: JSON of the tool's options, of which "out" is the folder.
    """
    note = Path(json.loads(options)["out"], NAME)
    register_post_import_hook(lambda module: _Count(module, note), "torch.optim.optimizer")


class _Count:
    """The hook on the steps of all optimizers. It stays: torch runs through its hooks just then."""

    def __init__(self, module: Any, note: Path) -> None:
        self._note, self._steps = note, 0
        self._is_over = False
        module.register_optimizer_step_post_hook(self)

    def __call__(self, *args: Any) -> None:
        if self._is_over:
            return
        self._steps += 1
        module = sys.modules.get("amp_patch.session")
        uses_amp = module is not None and module.session.was_used and not module.session.disabled
        self._is_over = uses_amp or self._steps == STEPS
        if self._steps == STEPS and not uses_amp:
            self._note.write_text(f"{os.getpid()}\n", encoding="utf-8")
