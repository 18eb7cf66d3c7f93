"""Stands before Python's own finders: tells a real apex from a folder of its name, and lends to it.

Knows nothing of what is supplied but who finds it; imports no torch.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .finder import Finder, absent, is_of_amp_patch, supplied_in

_NAME = "apex"


class RealApex:
    """In ``sys.meta_path`` for as long as a `Finder` that supplies what a real apex lacks.

    Args:
        supplied: finds what the real one lacks.
    """

    def __init__(self, supplied: Finder) -> None:
        self._supplied = supplied
        if _NAME in sys.modules:
            _lend(sys.modules[_NAME])

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return apex's spec; None for other names, and where there is no apex to be found.

        A folder named apex without an ``__init__.py``, as a clone of apex's repository in the
        script's folder is, is a package to Python, and no apex.
        """
        if fullname != _NAME:
            return None
        others = [one for one in sys.meta_path if not is_of_amp_patch(one)]
        specs = (one.find_spec(fullname, path, target) for one in others)
        spec = next(filter(None, specs), None)
        if spec is None or spec.loader is None:
            return self._supplied.find_spec(fullname)
        lent = copy.copy(spec)
        vars(lent)["loader"] = _Lending(spec.loader, self._supplied)
        return lent

    def uninstall(self) -> None:
        """Take itself off ``sys.meta_path``; the last one takes what is lent off the real apex."""
        sys.meta_path.remove(self)
        if not any(isinstance(one, RealApex) for one in sys.meta_path):
            while _lent:
                _lent.pop().undo()


class _Lending:
    """A real apex's loader; after ``import apex`` alone ``apex.amp`` is there, as it once was.

    What ``pip install apex`` brings is no NVIDIA's, and needs a web framework; a script of one's
    own may have the name as well. Where such a one cannot be imported, ours takes its place.
    """

    def __init__(self, loader: Any, supplied: Finder) -> None:
        self._loader, self._supplied = loader, supplied

    def exec_module(self, module: types.ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            if is_nvidias(getattr(module, "__path__", ())):
                raise
            warnings.warn(
                "`import apex` is to find NVIDIA's, or amp_patch's in its place; got "
                f"{module.__file__}, which is another and fails ({error}), so that amp_patch's "
                "stands in. Call pip uninstall apex, or rename it if it is yours.",
                stacklevel=2,
            )
            self._put_ours_in_its_place()
        else:
            _lend(module)

    def _put_ours_in_its_place(self) -> None:
        spec: Any = self._supplied.find_spec(_NAME)
        sys.modules[_NAME] = ours = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(ours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def is_nvidias(places: Iterable[str]) -> bool:
    """Tell NVIDIA's apex, of any age, by a package of it; ``places`` are its folders."""
    return any(Path(place, name).exists() for place in places for name in supplied_in(_NAME))


#: The `Patches` of real apexes.
_lent: list[Any] = []


def _lend(module: types.ModuleType) -> None:
    if "__getattr__" in vars(module):
        return
    # Where there is no real apex, no process pays for the import.
    from amp_patch.patching import Patches

    patches = Patches()
    patches.replace(module, "__getattr__", _import_submodule)
    _lent.append(patches)


def _import_submodule(name: str) -> types.ModuleType:
    if name in supplied_in(_NAME):
        return importlib.import_module(f"{_NAME}.{name}")
    raise absent(_NAME, name, sys._getframe(1))
