"""Which imported modules have bound what is replaced, or torch: of thousands, few are looked at.

Replaces nothing.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# The modules of installed packages of which no global was torch's when all were last looked
# through, and their fingerprints. A script assigns to globals of its own modules, not to theirs.
_WITHOUT_TORCH: dict[str, tuple[int, int]] = {}


@functools.cache
def is_left_alone(name: str) -> bool:
    """Tell whether nothing is replaced in a module of this name: torch's, and this package's."""
    return name.partition(".")[0] in ("torch", __package__)


def users_of_torch() -> list[types.ModuleType]:
    """Return the imported modules, outside torch, of which a global is torch or a module of it."""
    found = bindings_of_torch(imported(), {}, users_only=True)
    return list({module.__name__: module for module, _, _ in found}.values())


class Imported:
    """Which modules are imported, sorted by what is done with them.

    Attributes:
        left_alone: the names of torch's and of this package's.
        torchs: ``id(module) -> (module, module)`` of torch's.
        others: the names of all but those in `_WITHOUT_TORCH`.
    """

    def __init__(self) -> None:
        self._names, self._ids = list(sys.modules), list(map(id, sys.modules.values()))
        self.left_alone = set(filter(is_left_alone, self._names))
        self.torchs = {
            id(module): (module, module)
            for name, module in list(sys.modules.items())
            if _package(name) == "torch"
        }
        self.others: list[str] = []
        self._passed_over: list[dict[str, Any]] = []
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType):
                continue
            if _WITHOUT_TORCH.get(name) == _fingerprint(module):
                self._passed_over.append(vars(module))
            else:
                self.others.append(name)
        self._globals = sum(map(len, self._passed_over))

    def is_current(self) -> bool:
        """Tell whether nothing was imported since, and no module passed over has other globals.

        Of thousands of modules a loop of Python's would take longer than all else.
        """
        return (
            self._names == list(sys.modules)
            and self._ids == list(map(id, sys.modules.values()))
            and self._globals == sum(map(len, self._passed_over))
        )


_imported_last: list[Imported] = []


def imported() -> Imported:
    """Return which modules are imported: the same object until others are."""
    if not _imported_last or not _imported_last[0].is_current():
        _imported_last[:] = [Imported()]
    return _imported_last[0]


def bindings_of_torch(
    known: Imported, replacements: Mapping[int, tuple[Any, Any]], users_only: bool
) -> list[tuple[Any, str, Any]]:
    """As `bindings`, of torch's modules as well; remember the packages in which there is none."""
    left_alone = known.left_alone
    everything = {**known.torchs, **replacements}
    looked_at = known.others if users_only else list(sys.modules)
    found = list(bindings(everything, left_alone, looked_at))
    packages = {_package(module.__name__) for module, _, _ in found}
    if any(_package(name) in packages for name in _WITHOUT_TORCH):
        # A package uses torch from now on, and its modules of before may do so, too.
        _WITHOUT_TORCH.clear()
        looked_at = list(sys.modules)
        found = list(bindings(everything, left_alone, looked_at))
    without = {
        name: _fingerprint(module)
        for name, module in _modules(left_alone, looked_at)
        if _package(name) not in packages and _is_installed(name, module)
    }
    if any(_WITHOUT_TORCH.get(name) != seen for name, seen in without.items()):
        _WITHOUT_TORCH.update(without)
        _imported_last.clear()
    return found


@functools.cache
def _package(name: str) -> str:
    return name.partition(".")[0]


def _fingerprint(module: types.ModuleType) -> tuple[int, int]:
    """Return what differs once a module is loaded anew or has more or fewer globals."""
    return id(module), len(vars(module))


def _is_installed(name: str, module: types.ModuleType) -> bool:
    """Tell whether nobody assigns to a module's globals by hand: it is Python's or a package's."""
    if _package(name) in sys.stdlib_module_names:
        return True
    return str(vars(module).get("__file__")).startswith(_INSTALLED)


def bindings(
    replacements: Mapping[int, tuple[Any, Any]], left_alone: Collection[str], names: Iterable[str]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield ``(module, name, replacement)`` for each global bound to a key, of these modules."""
    for _, module in _modules(left_alone, names):
        own = vars(module)
        # Most modules have none, which this tells five times as fast as a loop of Python's.
        if replacements.keys().isdisjoint(map(id, list(own.values()))):
            continue
        for name, value in list(own.items()):
            found = replacements.get(id(value))
            if found is not None and found[0] is value:
                yield module, name, found[1]


def _modules(
    left_alone: Collection[str], names: Iterable[str]
) -> Iterator[tuple[str, types.ModuleType]]:
    for name in names:
        module = sys.modules.get(name)
        if name not in left_alone and isinstance(module, types.ModuleType):
            yield name, module
