"""Modules of torch that a script may import after `amp.initialize`, inside of a function say.

To import them for every script would take a second of each start.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from amp_patch.casting import torch_sites
from amp_patch.patching import Patches, when_imported

#: Path -> what makes a replacement of what stands there.
Replacements = Mapping[str, Callable[[Any], Any]]

#: Name of a module -> who waits for it. What is called at an import cannot be taken back, and a
#: process may initialize and deactivate many times: each name is asked for once.
_waiting: dict[str, weakref.WeakSet[LateModules]] = {}


class LateModules:
    """What is to be replaced in them, once they are imported."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._made: dict[str, Replacements] = {}

    def imported(self, made: Mapping[str, Replacements]) -> dict[str, Callable[[Any], Any]]:
        """Return what is to be replaced in those that are imported; see `follow` for the others.

        Args:
            made: by the name of the module.
        """
        self._made = {name: one for name, one in made.items() if name not in sys.modules}
        there = [one for name, one in made.items() if name not in self._made]
        return {path: make for one in there for path, make in one.items()}

    def follow(self, patches: Patches) -> None:
        """Replace in the others as soon as they are imported, until the patches are undone.

        Args:
            patches: have replaced something already.
        """
        self._patches = patches
        for name in self._made:
            if name not in _waiting:
                _waiting[name] = weakref.WeakSet()
                when_imported(name, _tell)
            _waiting[name].add(self)

    def replace_in(self, module: ModuleType) -> None:
        """Replace in a module that is imported now, unless the patches are undone."""
        if self._patches:
            torch_sites.replace(self._patches, self._made.pop(module.__name__, {}))


def _tell(module: ModuleType) -> None:
    for late in tuple(_waiting.pop(module.__name__, ())):
        late.replace_in(module)
