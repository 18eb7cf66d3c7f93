"""Finds ``packages/apex/amp/scaler.py`` for ``import apex.amp.scaler``, and says what is missing.

Knows where the files lie and nothing of what is in them; imports no torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .replacements import REPLACEMENTS

_PACKAGES = Path(__file__).parent / "packages"
_TOP_LEVEL = ("amp_C", "apex", "apex_C")


class Finder:
    """Stands in ``sys.meta_path``, where it finds modules, and apex's version for importlib.

    Attributes:
        installation: the handle of what put it there.
    """

    def __init__(self) -> None:
        self.installation: Any = None

    def owns(self, name: str) -> bool:
        """Return whether a module's name is one that apex has, or might have."""
        return name.partition(".")[0] in _TOP_LEVEL

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where a module of apex lies; None for one of another name.

        Raises:
            ModuleNotFoundError: apex's name, and nothing is supplied under it.
        """
        if not self.owns(fullname):
            return None
        place = _PACKAGES.joinpath(*fullname.split("."))
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.is_file():
            # Without name=: `from apex import transformer` would put Python's message in its place.
            raise ModuleNotFoundError(_not_supplied(fullname))
        spec = importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, str(file))
        )
        if is_package and spec is not None:
            # Empty: what lies in a package is for this finder to find, not for Python's own.
            spec.submodule_search_locations = []
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield the distribution 'apex' where importlib.metadata asks for it, or for all."""
        # Only who asks for versions pays for the import.
        from .distribution import Apex

        if context is None or context.name is None or context.name.lower() == "apex":
            yield Apex()


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        # `from apex.amp.opt import x` asks the finder for 'apex.amp.opt.x' where opt has no x, but
        # only of a module with a path; else Python's message would not say what to use instead.
        if not hasattr(module, "__path__"):
            module.__path__ = []


def is_supplied(module: types.ModuleType) -> bool:
    """Return whether a module came from `Finder`."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def supplied_in(name: str) -> list[str]:
    """Return the modules that lie in a package, and in ``packages`` itself for ''."""
    place = _PACKAGES.joinpath(*name.split(".")) if name else _PACKAGES
    modules = [*place.glob("*.py"), *(file.parent for file in place.glob("*/__init__.py"))]
    return sorted(path.stem for path in modules if not path.name.startswith("__"))


def _not_supplied(fullname: str) -> str:
    parent = fullname.rpartition(".")[0]
    while parent and not supplied_in(parent):
        parent = parent.rpartition(".")[0]
    names = ", ".join(name for name in supplied_in(parent) if not name.startswith("_"))
    instead = "look for its counterpart in torch"
    known = fullname
    while known:
        if known in REPLACEMENTS:
            instead = f"use {REPLACEMENTS[known]}"
            break
        known = known.rpartition(".")[0]
    return (
        f"amp_patch supplies no {fullname!r} in the place of apex; {parent or 'it'} has {names}. "
        f"Instead of {fullname.rpartition('.')[2]}, {instead}."
    )
