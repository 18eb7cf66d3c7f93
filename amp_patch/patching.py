"""Replaces attributes of foreign objects and puts them back; knows nothing of precision.

Every function or method of torch, of a module or of an optimizer that amp_patch replaces is
replaced here, recorded at that moment, and restored in reverse order.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from wrapt import register_post_import_hook, resolve_path

_ABSENT = object()
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# The modules of installed packages of which no global was torch's when all were last looked
# through, and their fingerprints. A script assigns to globals of its own modules, not to theirs.
_WITHOUT_TORCH: dict[str, tuple[int, int]] = {}


def resolve(path: str) -> tuple[object, str, Any]:
    """Find ``"torch.nn.functional.linear"``: the owner, the attribute's name, what is there now.

    Raises:
        AttributeError, ImportError: nothing stands at ``path``.
    """
    return resolve_in(*split_path(path))


def resolve_in(module: Any, name: str) -> tuple[object, str, Any]:
    """As `resolve`, for an attribute of a module (or its name), class or other object."""
    owner, name, value = resolve_path(module, name)
    return owner, name, value


def split_path(path: str) -> tuple[str, str]:
    """Split a dotted path into the module to import and the attribute path inside it."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in sys.modules:
            return module, ".".join(parts[end:])
    return parts[0], ".".join(parts[1:])


class Patches:
    """A stack of attribute replacements.

    ``undo`` restores in reverse order, so an attribute replaced twice ends as it began. What an
    object inherits (``torch.Tensor.matmul`` stands on a base class) is restored by deleting the
    replacement, for assigning the original would shadow the base class for good.
    """

    def __init__(self) -> None:
        # Owners are held weakly: a patched optimizer that the user drops must go.
        self._undo: list[tuple[Callable[[], Any], str, Callable[[], Any], Callable[[], Any]]] = []
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._left_alone: set[str] = set()
        self._users_only = False

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, new: Any, *, weakly: bool = False) -> None:
        """Set ``owner.name`` to ``new`` and record how to restore it.

        Args:
            weakly: record neither what was there nor ``new`` in a way that keeps it, for either
                may keep the owner, as its bound methods do. Then ``new`` must keep what it
                replaces.
        """
        keep = _reference_to if weakly else _holder_of
        old, current = keep(vars(owner).get(name, _ABSENT)), keep(new)
        reference = _reference_to(owner)
        setattr(owner, name, new)
        self._undo.append((reference, name, old, current))

    def replace_bindings(
        self, replacements: Mapping[int, tuple[Any, Any]], *, users_only: bool = False
    ) -> list[types.ModuleType]:
        """Replace module globals bound to an original, outside torch.

        ``from torch.nn.functional import linear`` at the top of a user's file is such a binding.

        Args:
            replacements: ``id(original) -> (original, replacement)``.
            users_only: pass over installed packages that do not use torch, now and in `undo`: the
                originals are all torch's. Of thousands of modules most are in such packages.

        Returns:
            The modules that use torch, see `users_of_torch`.
        """
        self.expect_bindings(replacements)
        known = imported()
        self._left_alone, self._users_only = known.left_alone, users_only
        # Both in one pass: there may be a thousand modules.
        users = {}
        for module, name, new in _bindings_of_torch(known, replacements, users_only):
            users[module.__name__] = module
            if not isinstance(new, types.ModuleType):
                self.replace(module, name, new)
        return list(users.values())

    def expect_bindings(self, replacements: Mapping[int, tuple[Any, Any]]) -> None:
        """As `replace_bindings`, of originals that no other module has bound: `undo` looks for it.

        Those of a module that was imported this moment, say.
        """
        self._originals.update((id(new), (new, old)) for old, new in replacements.values())

    def undo(self) -> None:
        """Restore everything in reverse order; what others replaced since then is left alone.

        Modules imported since then, of torch too, may have bound a replacement as a global.
        """
        if self._originals:
            names = imported().others if self._users_only else list(sys.modules)
            late = _bindings(self._originals, self._left_alone, names)
            for module, name, original in late:
                setattr(module, name, original)
        self._originals.clear()
        while self._undo:
            reference, name, old, new = self._undo.pop()
            owner = reference()
            if owner is None or vars(owner).get(name, _ABSENT) is not new():
                continue
            original = old()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def remove(owner: Any, name: str, value: Any) -> None:
    """Delete ``owner.name``, if it is ``value``: what an import left at a package, say."""
    if vars(owner).get(name, _ABSENT) is value:
        delattr(owner, name)


@functools.cache
def is_left_alone(name: str) -> bool:
    """Tell whether nothing is replaced in a module of this name: torch's, and this package's."""
    return name.partition(".")[0] in ("torch", __package__)


def users_of_torch() -> list[types.ModuleType]:
    """Return the imported modules, outside torch, of which a global is torch or a module of it."""
    found = _bindings_of_torch(imported(), {}, users_only=True)
    return list({module.__name__: module for module, _, _ in found}.values())


def put(holder: Any, key: Any, new: Any) -> None:
    """Replace what ``holder`` holds at ``key``, in place, whatever its class overrides.

    Args:
        holder: a dict or list; a ``functools.partial``; or any object with attributes, among them
            a class, a function and the cell of a closure.
        key: the key or index; the name of an attribute; of a partial "func" or "args".
        new: what is held there from now on.
    """
    if isinstance(holder, dict):
        dict.__setitem__(holder, key, new)
    elif isinstance(holder, list):
        list.__setitem__(holder, key, new)
    elif isinstance(holder, functools.partial):
        state: Any = functools.partial.__reduce__(holder)[2]
        function, args, *rest = state
        state = (new, args, *rest) if key == "func" else (function, new, *rest)
        functools.partial.__setstate__(holder, state)  # type: ignore[attr-defined]  # no stub
    elif isinstance(holder, type):
        type.__setattr__(holder, key, new)
    else:
        object.__setattr__(holder, key, new)


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


def _bindings_of_torch(
    known: Imported, replacements: Mapping[int, tuple[Any, Any]], users_only: bool
) -> list[tuple[Any, str, Any]]:
    """As `_bindings`, of torch's modules as well; remember the packages in which there is none."""
    left_alone = known.left_alone
    everything = {**known.torchs, **replacements}
    looked_at = known.others if users_only else list(sys.modules)
    found = list(_bindings(everything, left_alone, looked_at))
    packages = {_package(module.__name__) for module, _, _ in found}
    if any(_package(name) in packages for name in _WITHOUT_TORCH):
        # A package uses torch from now on, and its modules of before may do so, too.
        _WITHOUT_TORCH.clear()
        looked_at = list(sys.modules)
        found = list(_bindings(everything, left_alone, looked_at))
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


def _reference_to(owner: Any) -> Callable[[], Any]:
    """Return what returns an object, held weakly if it can be: a SimpleNamespace cannot."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return _holder_of(owner)


def _holder_of(value: Any) -> Callable[[], Any]:
    return lambda: value


def _bindings(
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


def as_if_defined_at(function: Callable[..., Any], path: str) -> None:
    """Give a replacement the place it is found at, so that pickling it by reference works."""
    module, qualname = split_path(path)
    function.__module__ = module
    function.__qualname__ = qualname


def bind(function: Callable[..., Any], owner: object) -> types.MethodType:
    """Bind a function as a method of ``owner`` without keeping ``owner`` alive.

    Learning-rate schedulers read ``optimizer.step.__func__``, so a plain function will not do;
    a method bound to the object itself, stored on it, is a cycle that only the collector ends.
    """
    return types.MethodType(function, weakref.proxy(owner))


def when_imported(module: str, action: Callable[[types.ModuleType], None]) -> None:
    """Call ``action(module)`` now if the named module is imported, else as soon as it is."""
    register_post_import_hook(action, module)
