"""Replaces attributes of foreign objects and puts them back; knows nothing of precision.

Every function or method of torch, of a module or of an optimizer that amp_patch replaces is
replaced here, recorded at that moment, and restored in reverse order.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from wrapt import register_post_import_hook, resolve_path

from .common.imported_modules import bindings, bindings_and_users, imported, is_left_alone

F = TypeVar("F", bound=Callable[..., Any])
_ABSENT = object()
#: What `split_path` has found: each `amp.initialize` asks for hundreds of the same paths.
_split_before: dict[str, tuple[str, str]] = {}


def resolve(path: str) -> tuple[object, str, Any]:
    """Find ``"torch.nn.functional.linear"``: the owner, the attribute's name, what is there now.

    Raises:
        AttributeError, ImportError: nothing stands at ``path``.
    """
    return resolve_in(*split_path(path))


def resolve_in(module: Any, name: str) -> tuple[object, str, Any]:
    """As `resolve`, for an attribute of a module (or its name), class or other object."""
    if isinstance(module, str):  # what is there need not be asked for by an import
        module = sys.modules.get(module) or module
    if type(module) is types.ModuleType:
        if name in vars(module):
            return module, name, vars(module)[name]
        head, _, method = name.partition(".")
        # Hundreds are methods, for which wrapt would take most of the time of `amp.initialize`.
        kind = vars(module).get(head)
        for base in kind.__mro__ if isinstance(kind, type) else ():
            if method in vars(base):
                return kind, method, vars(base)[method]
    owner, name, value = resolve_path(module, name)
    return owner, name, value


def split_path(path: str) -> tuple[str, str]:
    """Split a dotted path into the module to import and the attribute path inside it."""
    known = _split_before.get(path)
    if known is not None and known[0] in sys.modules:
        return known
    known = _split_before[path] = _split(path)
    return known


def _split(path: str) -> tuple[str, str]:
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
        # Rows: owner, name, what was there, what is there now, and whether these two are held
        # weakly. Owners always are: a patched optimizer that the user drops must go.
        self._undo: list[tuple[Callable[[], Any], Any, Any, Any, bool]] = []
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._left_alone: set[str] = set()
        self._users_only = False

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: Any, new: Any, *, weakly: bool = False) -> None:
        """Set ``owner.name`` to ``new`` and record how to restore it.

        Args:
            owner: of which ``name`` is an attribute; or a dict, of which it is a key.
            weakly: record neither what was there nor ``new`` in a way that keeps it, for either
                may keep the owner, as its bound methods do. Then ``new`` must keep what it
                replaces.
        """
        old, current = _held_by(owner).get(name, _ABSENT), new
        if weakly:
            old, current = _reference_to(old), _reference_to(new)
        # Before it is set: Ctrl-C may come between the two, and what is not there is not undone.
        self._undo.append((_reference_to(owner), name, old, current, weakly))
        try:
            _set(owner, name, new)
        except Exception:  # it is refused
            self._undo.pop()
            raise

    def replace_bindings(
        self, replacements: Mapping[int, tuple[Any, Any]], *, users_only: bool = False
    ) -> list[types.ModuleType]:
        """Replace module globals bound to an original, outside torch.

        ``from torch.nn.functional import linear`` at the top of a user's file is such a binding.

        Args:
            replacements: ``id(original) -> (original, replacement)``.
            users_only: pass over installed packages that do not use torch, now and in `undo`: the
                originals are torch's, or of a library that uses it. Of thousands of modules most
                are in such packages.

        Returns:
            The modules that use torch, see `users_of_torch`.
        """
        known = imported()
        self._look_for(replacements)
        self._left_alone, self._users_only = known.left_alone, users_only
        # Both in one pass: there may be a thousand modules.
        found, users = bindings_and_users(known, replacements, users_only)
        for module, name, new in found:
            self.replace(module, name, new)
        return users

    def expect_bindings(self, replacements: Mapping[int, tuple[Any, Any]]) -> None:
        """As `replace_bindings`, of originals that no other module has bound: `undo` looks for it.

        Those of a module that was imported this moment, say. Installed packages that do not use
        torch are passed over, unless `replace_bindings` was told not to.
        """
        if not self._originals:
            self._left_alone, self._users_only = imported().left_alone, True
        self._look_for(replacements)

    def _look_for(self, replacements: Mapping[int, tuple[Any, Any]]) -> None:
        self._originals.update((id(new), (new, old)) for old, new in replacements.values())

    def undo(self) -> list[types.ModuleType]:
        """Restore everything in reverse order; what others replaced since then is left alone.

        Modules imported since then, of torch too, may have bound a replacement as a global. After
        an interrupt a second call restores the rest.

        Returns:
            The modules outside of torch of which a global was a replacement.
        """
        users: dict[types.ModuleType, None] = {}
        if self._originals:
            known = imported()
            of_torch = known.left_alone - self._left_alone
            names = {*known.others, *of_torch} if self._users_only else set(sys.modules)
            late = bindings(self._originals, self._left_alone, names)
            for module, name, original in late:
                setattr(module, name, original)
                if not is_left_alone(module.__name__):
                    users[module] = None
        self._originals.clear()
        while self._undo:
            self._restore(*self._undo[-1])
            self._undo.pop()
        return list(users)

    @staticmethod
    def _restore(reference: Callable[[], Any], name: Any, old: Any, new: Any, weakly: bool) -> None:
        owner = reference()
        if weakly:
            old, new = old(), new()
        if owner is None or _held_by(owner).get(name, _ABSENT) is not new:
            return
        if old is _ABSENT:
            delattr(owner, name)
        else:
            _set(owner, name, old)


def set_class(objects: Iterable[Any], new: type[Any]) -> None:
    """Make objects instances of another class, which has the same slots, until it is set again."""
    for one in objects:
        one.__class__ = new


def remove(owner: Any, name: str, value: Any) -> None:
    """Delete ``owner.name``, if it is ``value``: what an import left at a package, say."""
    if vars(owner).get(name, _ABSENT) is value:
        delattr(owner, name)


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


def take_away(holder: Any, name: str) -> None:
    """Delete an attribute of an object, whatever its class overrides."""
    object.__delattr__(holder, name)


def _held_by(owner: Any) -> Mapping[Any, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _reference_to(owner: Any) -> Callable[[], Any]:
    """Return what returns an object, held weakly if it can be: a SimpleNamespace cannot."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def as_if_defined_at(function: Callable[..., Any], path: str) -> None:
    """Give a replacement the place it is found at, so that pickling it by reference works."""
    module, qualname = split_path(path)
    function.__module__ = module
    function.__qualname__ = qualname


def is_no_method(owner: object, value: Any) -> bool:
    """Tell whether a value stands in a class and is not bound to what it is called on, as a mock.

    A function in its place would be: it is left alone.
    """
    return isinstance(owner, type) and not hasattr(type(value), "__get__")


def as_function(value: Any, name: str) -> Any:
    """Return what a wrapper is made around: a callable, or a function that calls it.

    An object that is not named as functions are, such as a mock, tells what it is by none of their
    attributes.
    """
    if isinstance(getattr(value, "__name__", None), str):
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def stood_for(function: Any) -> Any:
    """Return what a wrapper of this package says that it stands for; None of any other function.

    functools.wraps gives the attribute to a user's function, too, which stands for nothing.
    """
    is_ours = is_left_alone(getattr(function, "__globals__", {}).get("__name__", ""))
    return getattr(function, "stands_for", None) if is_ours else None


def hide_from_torchscript(wrapper: F, original: Any) -> F:
    """Have TorchScript, which cannot read a closure, compile what a wrapper calls; return it."""
    wrapper.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]  # our own
    return wrapper


def stand_for(wrapper: F, original: Any) -> F:
    """Do so, and have `stood_for` tell that the wrapper is in the place of a function of torch."""
    wrapper.stands_for = original  # type: ignore[attr-defined]  # our own
    return hide_from_torchscript(wrapper, original)


def bind(function: Callable[..., Any], owner: object) -> types.MethodType:
    """Bind a function as a method of ``owner`` without keeping ``owner`` alive.

    Learning-rate schedulers read ``optimizer.step.__func__``, so a plain function will not do;
    a method bound to the object itself, stored on it, is a cycle that only the collector ends.
    """
    return types.MethodType(function, weakref.proxy(owner))


def when_imported(module: str, action: Callable[[types.ModuleType], None]) -> None:
    """Call ``action(module)`` now if the named module is imported, else as soon as it is."""
    register_post_import_hook(action, module)
