"""Which imported modules have bound what is replaced, or torch: of thousands, few are looked at.

Replaces nothing.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import threading
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

#: ``id(original) -> (original, replacement)``
Replacements = Mapping[int, tuple[Any, Any]]
#: A module, the name of a global of it, and what is to stand there.
Binding = tuple[Any, str, Any]

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
#: Packages in which nothing is replaced: torch, and this one.
_LEFT_ALONE = ("torch", __name__.partition(".")[0])
#: What multiprocessing calls the script of a process that it has spawned.
_SPAWNED = "__mp_main__"
# The modules of installed packages of which no global was torch's when all were last looked
# through, and their fingerprints. A script assigns to globals of its own modules, not to theirs.
_without_torch: dict[str, tuple[int, int]] = {}


@functools.cache
def is_left_alone(name: str) -> bool:
    """Tell whether nothing is replaced in a module of this name: torch's, and this package's."""
    return name.partition(".")[0] in _LEFT_ALONE


def users_of_torch() -> list[types.ModuleType]:
    """Return the imported modules, outside torch, of which a global is torch or a module of it."""
    return bindings_and_users(imported(), {}, users_only=True)[1]


class Imported:
    """Which modules are imported, sorted by what is done with them.

    Attributes:
        left_alone: the names of torch's and of this package's.
        torchs: the ids of torch's.
        others: the names of all but these and those in `_without_torch`.
        without_torch: the packages of the latter.
    """

    def __init__(self) -> None:
        self._ids = list(map(id, sys.modules.values()))
        self.left_alone = set(filter(is_left_alone, list(sys.modules)))
        self.torchs = {
            id(module) for name, module in sys.modules.copy().items() if _package(name) == "torch"
        }
        self.others: list[str] = []
        self.without_torch: set[str] = set()
        self._passed_over: list[dict[str, Any]] = []
        for name, module in list(sys.modules.items()):
            if name in self.left_alone or not isinstance(module, types.ModuleType):
                continue
            if _without_torch.get(name) == _fingerprint(module):
                self._passed_over.append(vars(module))
                self.without_torch.add(_package(name))
            else:
                _without_torch.pop(name, None)
                self.others.append(name)
        self._globals = sum(map(len, self._passed_over))

    def is_current(self) -> bool:
        """Tell whether nothing was imported since, and no module passed over has other globals.

        Of thousands of modules a loop of Python's would take longer than all else.
        """
        known = self._ids == list(map(id, sys.modules.values()))
        return known and self._globals == sum(map(len, self._passed_over))


_imported_last: list[Imported] = []


class _Looked(threading.local):
    """For each `one_look` that a thread is inside of, whether it has looked there."""

    def __init__(self) -> None:
        self.inside: list[bool] = []


_looked = _Looked()


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """Look once, inside of this, which modules are imported, however often that is asked.

    To look through thousands of names takes milliseconds. What `amp.initialize` imports itself has
    bound nothing that it replaces.
    """
    _looked.inside.append(False)
    try:
        yield
    finally:
        _looked.inside.pop()


def imported() -> Imported:
    """Return which modules are imported: the same object until others are."""
    inside = _looked.inside
    known = bool(inside) and inside[-1]
    if not _imported_last or not (known or _imported_last[0].is_current()):
        _imported_last[:] = [Imported()]
    if inside:
        inside[-1] = True
    return _imported_last[0]


def bindings_and_users(
    known: Imported, replacements: Replacements, users_only: bool
) -> tuple[list[Binding], list[types.ModuleType]]:
    """Look through all modules, or those that may use torch, but torch's and this package's.

    The packages in which no module uses torch, or has bound a key of the replacements, are passed
    over from then on.

    Returns:
        As `bindings`; and the modules that use torch or have one of these.
    """
    names = known.others if users_only else list(sys.modules)
    found, users = _look_through(known, replacements, names)
    packages = {_package(module.__name__) for module in users}
    if not packages.isdisjoint(known.without_torch):
        # A package uses torch from now on, and its modules of before may do so, too.
        _without_torch.clear()
        _imported_last.clear()
        names = list(sys.modules)
        found, users = _look_through(known, replacements, names)
    without = {
        name: _fingerprint(module)
        for name, module in _modules(known.left_alone, names)
        if _package(name) not in packages and _is_installed(name, module)
    }
    if any(_without_torch.get(name) != seen for name, seen in without.items()):
        _without_torch.update(without)
        _imported_last.clear()
    return found, users


def _look_through(
    known: Imported, replacements: Replacements, names: Iterable[str]
) -> tuple[list[Binding], list[types.ModuleType]]:
    found: list[Binding] = []
    users = []
    for _, module in _modules(known.left_alone, names):
        here = _bound_in(module, replacements)
        if here or not known.torchs.isdisjoint(map(id, list(vars(module).values()))):
            found += here
            users.append(module)
    return found, users


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
    replacements: Replacements, left_alone: Collection[str], names: Iterable[str]
) -> Iterator[Binding]:
    """Yield each global that is bound to a key, of these modules."""
    for _, module in _modules(left_alone, names):
        yield from _bound_in(module, replacements)


def _bound_in(module: types.ModuleType, replacements: Replacements) -> list[Binding]:
    own = vars(module)
    # Most modules have none, which this tells five times as fast as a loop of Python's.
    if replacements.keys().isdisjoint(map(id, list(own.values()))):
        return []
    found = [(name, value, replacements.get(id(value))) for name, value in list(own.items())]
    return [(module, name, pair[1]) for name, value, pair in found if pair and pair[0] is value]


def _modules(
    left_alone: Collection[str], names: Iterable[str]
) -> Iterator[tuple[str, types.ModuleType]]:
    for name in names:
        module = sys.modules.get(name)
        if name not in left_alone and isinstance(module, types.ModuleType):
            yield name, module
            if name == _SPAWNED:
                yield from ((name, one) for one in _globals_behind(module))


class _Globals:
    """A dict of globals that is no module's; its attributes are them."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.__dict__ = own


#: Of the script of this process, which holds the dict.
_behind: list[Any] = []


def _globals_behind(module: types.ModuleType) -> list[Any]:
    """Return the globals that the functions of a spawned process's script have.

    multiprocessing runs the script anew there, and gives the module a copy of what it has left.
    """
    if not _behind:
        for function in _functions_of(module):
            own = function.__globals__
            if own is not vars(module) and own.get("__name__") == _SPAWNED:
                _behind.append(_Globals(own))
                break
    return _behind


def _functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions and methods among the globals of a module."""
    for value in list(vars(module).values()):
        held = list(vars(value).values()) if isinstance(value, type) else [value]
        yield from (one for one in held if isinstance(one, types.FunctionType))
