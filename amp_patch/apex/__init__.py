"""The drop-in for scripts that import apex: ``install()`` makes ``import apex`` work.

Owns whether it stands, in this process and in those to come; what is imported lies in
``packages``, each file under the name that scripts import it by. Imports no torch, for it runs
at the start of every process of ``amp-patch run``.
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

from .finder import Finder, is_supplied
from .real_apex import RealApex

__all__ = ["Installation", "install", "uninstall"]


class Installation:
    """What one `install` did; ends with the ``with`` block around it, or by `uninstall`."""

    def __init__(
        self, finder: Finder, real: RealApex | None, set_aside: dict[str, types.ModuleType]
    ) -> None:
        self._finder = finder
        self._real = real
        self._set_aside = set_aside

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Undo it, once; what an earlier `install` supplies stays."""
        if self._finder not in sys.meta_path:
            return
        sys.meta_path.remove(self._finder)
        if self._real is not None:
            self._real.uninstall()
        if not _installed():
            _forget_modules()
        sys.modules.update(self._set_aside)


def install(*, force: bool = False) -> Installation:
    """Let this process import ``apex`` and what it compiled, and find apex's version.

    Args:
        force: take all of these names, also where a real apex is installed. Else its modules
            stay, and only what it lacks is supplied. A folder named apex that is no package, a
            clone of its repository say, is none.

    Returns:
        A handle with ``uninstall()``, which is a context manager as well.

    Raises:
        TypeError: force is no bool.
    """
    if not isinstance(force, bool):
        raise TypeError(
            f"force must be True or False; got {force!r}; call amp_patch.apex.install(force=True)."
        )
    finder = Finder()
    meta_path: list[Any] = sys.meta_path
    meta_path.insert(0 if force else len(meta_path), finder)
    real = None if force else RealApex(finder)
    if real is not None:
        forced = itertools.takewhile(lambda one: isinstance(one, Finder), meta_path)
        meta_path.insert(len(list(forced)), real)
    set_aside = {}
    for name in [name for name in sys.modules if finder.owns(name)] if force else ():
        if not is_supplied(sys.modules[name]):
            set_aside[name] = sys.modules.pop(name)
    installation = Installation(finder, real, set_aside)
    finder.installation = installation
    return installation


def uninstall() -> None:
    """Undo every `install` of this process. What ``amp.initialize`` set up stays.

    Without effect where nothing is installed. ``amp.deactivate()`` restores models, optimizers
    and torch's functions.
    """
    for finder in _installed():
        if finder.installation is not None:
            finder.installation.uninstall()


def _forget_modules() -> None:
    """Take what was supplied out of ``sys.modules``, and off the packages of a real apex."""
    for name in [name for name, module in sys.modules.items() if is_supplied(module)]:
        module = sys.modules.pop(name)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and not is_supplied(sys.modules[parent]):
            # Where there is no real apex, no process pays for the import.
            from amp_patch.patching import remove

            remove(sys.modules[parent], child, module)


def _installed() -> list[Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, Finder)]
