"""Mixed-precision training for PyTorch by one line of code: ``from amp_patch import amp``.

This file owns the package's version, and the name of `sweep`; the calls are in ``amp_patch.amp``.
Importing it imports no other module of ours, nor torch: ``amp_patch.amp`` and the other public
modules are imported when they are first asked for. No torch attribute is touched before
``amp.initialize``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["__version__", "amp", "sweep"]

__version__ = "0.1.0"

_MODULES = ("amp", "apex", "cuda_graph", "debug", "optimizers")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"amp_patch.{name}")
    raise AttributeError(
        f"module 'amp_patch' has no attribute {name!r}; its calls are in amp_patch.amp: write "
        "from amp_patch import amp"
    )


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *_MODULES, *dunders})


def sweep(
    train_fn: Any,
    *,
    levels: Any = ("O0", "O1", "O2", "O3", "O4", "O5"),
    steps: int | None = None,
    repeat: int = 1,
    out: Any = None,
    tolerance: float = 0.05,
    timeout: float | None = None,
    resume: Any = None,
    seed: int = 0,
) -> Any:
    """Train at several levels, each in a process of its own, and compare: ``amp-patch sweep``.

    Files are written and the table is printed as by the command. Needs ``amp_patch[sweep]``.

    Args:
        train_fn: trains, with its own `amp.initialize`, whose level is overridden. Called without
            arguments, or with the level's name where it needs one. It goes to the processes by
            cloudpickle, with the globals that it uses.
        levels: names of levels, in the order in which they run.
        steps: of each run; None: until ``train_fn`` returns.
        repeat: rounds over all levels.
        out: folder for all files, which must not hold a sweep; None: amp-sweep, amp-sweep-2, ...
        tolerance: how far the final loss may be from O0's, as a share of it, below 1.
        timeout: seconds that a run may take.
        resume: folder of a sweep of the same function that goes on, in place of ``out``. Options
            that are left at their defaults stay as they were.
        seed: of the first round; each further round has the next.

    Returns:
        A result with ``comparison`` (``rows`` with the figures and the verdict of each level),
        ``recommendation``, ``folder`` and ``runs``.

    Raises:
        TypeError: train_fn is no such function, or cannot be sent to another process.
        ValueError: a level that there is not, a number out of range, or a folder that cannot be.
        RuntimeError: called by a training that is being swept.
        ModuleNotFoundError: the extra is not installed.
        KeyboardInterrupt: Ctrl-C ended the sweep; its files are written.
    """
    options = {"steps": steps, "repeat": repeat, "tolerance": tolerance, "timeout": timeout}
    function = importlib.import_module("amp_patch.tools.sweep.function")
    return function.run(train_fn, levels=levels, out=out, resume=resume, seed=seed, **options)
