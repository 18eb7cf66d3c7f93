"""Attaches the tool that the environment names, in the process of the user's script.

Knows the variables of the environment that `launch` sets; imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
from typing import Any

from wrapt import register_post_import_hook

from . import early_notice

#: Names what is called in the script's process, as "module:function", when it imports amp_patch.
TOOL = "AMP_PATCH_TOOL"
#: JSON that this function finds there.
OPTIONS = "AMP_PATCH_TOOL_OPTIONS"
#: The process of the command, which ends the script when it is interrupted.
PARENT = "AMP_PATCH_TOOL_PARENT"
#: See prctl(2).
_PR_SET_PDEATHSIG = 1

#: The options of the tool in this process: a script may clear its environment.
_given: dict[str, Any] = {}


def attach() -> None:
    """Let the tool come in when amp_patch is imported, if there is one."""
    tool = os.environ.get(TOOL)
    if tool:
        end_with_parent()
        register_post_import_hook(tool, "amp_patch.session")
        _given.update(json.loads(os.environ[OPTIONS]))
        early_notice.watch(_given)
        if "seed" in _given:
            seed_everything(_given["seed"])


def options() -> dict[str, Any]:
    """Return what the command line passed to the tool in this process.

    Raises:
        KeyError: no tool runs the script.
    """
    found: dict[str, Any] = _given or json.loads(os.environ[OPTIONS])
    return found


def end_with_parent() -> None:
    """Have Linux end this process where the command is killed, which can end nothing then."""
    if sys.platform == "linux" and os.environ.get(PARENT) == str(os.getppid()):
        with contextlib.suppress(AttributeError, OSError):  # a libc of another kind
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def seed_everything(seed: int) -> None:
    """Seed Python's random numbers, and torch's and NumPy's as soon as they are imported.

    That is before a script makes its model, which may be before it imports amp.
    """
    random.seed(seed)

    def seed_torch(torch: Any) -> None:
        torch.manual_seed(seed)

    def seed_numpy(numpy: Any) -> None:
        numpy.random.seed(seed)

    register_post_import_hook(seed_torch, "torch")
    register_post_import_hook(seed_numpy, "numpy")
