"""Finds ``packages/apex/amp/scaler.py`` for ``import apex.amp.scaler``.

Knows where the files lie and nothing of what is in them; imports no torch.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .missing import advice, advice_on_compiled, is_from_import, is_import
from .replacements import COMPILED

_PACKAGES = Path(__file__).parent / "packages"
_TOP_LEVEL = ("amp_C", "apex", "apex_C", "fused_adam_cuda")


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
        """Return where a module of apex lies; None where there is none.

        Raises:
            ModuleNotFoundError: an import of apex's, or of what it compiled, and nothing is there.
        """
        if fullname in COMPILED and is_import(sys._getframe(1)) and not _others_find(fullname):
            raise ModuleNotFoundError(advice_on_compiled(fullname), name=fullname)
        # A plug-in loader's fromlist=[""] asks for "apex.amp.", whose place is that of "apex.amp".
        if not self.owns(fullname) or fullname.endswith("."):
            return None
        place = _PACKAGES.joinpath(*fullname.split("."))
        is_package = (place / "__init__.py").is_file()
        file = place / "__init__.py" if is_package else place.with_suffix(".py")
        if not file.is_file():
            if is_import(sys._getframe(1)):
                raise ModuleNotFoundError(_not_supplied(fullname), name=fullname)
            return None
        spec = importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_Loader(fullname, str(file)),
            submodule_search_locations=[] if is_package else None,
        )
        if spec is not None and spec.submodule_search_locations is not None:
            # Python put the folder in, but what lies there is for this finder to find.
            spec.submodule_search_locations.clear()
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """Yield the distribution 'apex' where importlib.metadata asks for it, or for all."""
        # Only who asks for versions pays for the import.
        from .distribution import Apex

        if context is None or context.name is None or context.name.lower() == "apex":
            yield Apex()


class _Loader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        vars(module)["__getattr__"] = _getattr_of(spec.name)
        return module


def _getattr_of(module: str) -> Callable[[str], Any]:
    """Return what Python calls for a name that a module has not."""

    def __getattr__(name: str) -> Any:
        raise absent(module, name, sys._getframe(1))

    return __getattr__


def absent(module: str, name: str, frame: types.FrameType) -> Exception:
    """Return the error for a name that a module has not.

    Args:
        frame: of what asked the module for it.
    """
    words = f"module {module!r} has no attribute {name!r}"
    if name.startswith("__"):  # Python asks for many of these
        return AttributeError(words)
    named = getattr(sys.modules.get(module), "__all__", None)
    told = _not_supplied(f"{module}.{name}", named)
    if is_from_import(frame):
        return ImportError(told, name=module)
    return AttributeError(f"{words}: {told}")


def is_of_amp_patch(finder: object) -> bool:
    """Return whether a finder in ``sys.meta_path`` is the drop-in's, and finds no real apex."""
    module = type(finder).__module__
    return module.startswith("amp_patch.apex.") or module == "amp_patch_apex"


def is_supplied(module: types.ModuleType) -> bool:
    """Return whether a module came from `Finder`."""
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


@functools.cache
def supplied_in(name: str) -> Sequence[str]:
    """Return the modules that lie in a package, and in ``packages`` itself for ''."""
    place = _PACKAGES.joinpath(*name.split(".")) if name else _PACKAGES
    modules = [*place.glob("*.py"), *(file.parent for file in place.glob("*/__init__.py"))]
    return tuple(sorted(path.stem for path in modules if not path.name.startswith("__")))


def _not_supplied(fullname: str, names: Sequence[str] | None = None) -> str:
    """Return what to say of a name that is not there.

    Args:
        fullname: of a module, or of what is in one.
        names: what is in the module around it; else the modules that lie there are named.
    """
    parent = fullname.rpartition(".")[0]
    while not names and parent and not supplied_in(parent):
        parent = parent.rpartition(".")[0]
    public = [name for name in names or supplied_in(parent) if not name.startswith("_")]
    return advice(fullname, f"{parent or 'it'} has {', '.join(public)}")


def _others_find(fullname: str) -> bool:
    """Return whether there is a module of a name, the user's own or a real apex's."""
    others = [one for one in sys.meta_path if not isinstance(one, Finder)]
    return any(one.find_spec(fullname, None) is not None for one in others)
