"""Modules of torch that a script may import after `amp.initialize`, inside of a function say.

To import them for every script would take a second of each start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from amp_patch.casting import torch_sites
from amp_patch.patching import Patches, when_imported

#: Path -> what makes a replacement of what stands there.
Replacements = Mapping[str, Callable[[Any], Any]]


class LateModules:
    """What is to be replaced in them, once they are imported."""

    def __init__(self) -> None:
        self._awaited: set[str] = set()
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
        for name in self._made.keys() - self._awaited:
            self._awaited.add(name)
            when_imported(name, self._imported)

    def _imported(self, module: ModuleType) -> None:
        if self._patches:  # which are not undone
            torch_sites.replace(self._patches, self._made.pop(module.__name__, {}))
