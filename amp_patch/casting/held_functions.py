"""Finds the functions of torch that users' objects hold, and puts the wrappers in their place.

``self.act = F.softplus``, a ``functools.partial`` of it and a table of activations hold the
function itself: a patched attribute of torch does not reach them. Knows how objects hold
functions; knows nothing of casts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.common.imported_modules import (
    Imported,
    Replacements,
    imported,
    is_left_alone,
    users_of_torch,
)
from amp_patch.common.living_objects import instances, is_set_up
from amp_patch.patching import put

# An object, a key or attribute of it, and what it holds there.
Place = tuple[Any, Any, Any]

# A longer one is data, and no table of functions: looking through it would take time.
_LONGEST = 1000
_CONTAINERS = (dict, list, functools.partial)
_HOLDERS = (
    *_CONTAINERS, types.FunctionType, types.MethodType, types.SimpleNamespace, nn.Module,
)  # fmt: skip
#: Where functions that torch makes of others (`torch.compile`, ``vmap``, ``no_grad()``) hold them:
#: variables of their closures; and attributes, which torch.compile reads in what it traces.
_CLOSED_OVER = ("fn", "func")
_TRACED = ("_torchdynamo_orig_callable", "_torchdynamo_inline")
# What every module has; submodules are looked through by themselves.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (
    str, int, float, type, type(None), torch.dtype,
    types.BuiltinFunctionType, types.MethodDescriptorType,
)  # fmt: skip
_HOLDS_NOTHING = frozenset({*_PLAIN, bool, types.ModuleType})


class HeldFunctions:
    """Puts wrappers where the functions are held, and puts the functions back.

    Containers, partials, closures and default arguments are changed in place and stay the
    objects that they are. A tuple or a static method cannot be changed: another takes its place.
    `undo` puts the first one back; of a tuple that holds more than functions and plain values (a
    layer, say) an equal one, for keeping that tuple would keep a dropped model alive.

    Nothing records where a wrapper was put, for a copy of a model takes wrappers along, and a
    model that is built while functions are patched holds them from the start: `undo` looks
    through every living module, and through the files that were looked through before.
    """

    def __init__(self) -> None:
        self._wrappers: Replacements = {}
        self._originals: dict[int, tuple[Any, Any]] = {}
        self._classes: weakref.WeakSet[type] = weakref.WeakSet()
        self._users: set[types.ModuleType] = set()

    def __bool__(self) -> bool:
        """Whether there is something to put back."""
        return bool(self._originals)

    def install(
        self,
        wrappers: Replacements,
        users: Iterable[types.ModuleType],
        models: Iterable[nn.Module],
    ) -> None:
        """Replace what is held now; what comes later is for `reach`.

        Args:
            wrappers: ``id(original) -> (original, wrapper)``.
            users: modules; tables of functions in their globals, partials, layers and the default
                arguments of their functions are looked through.
            models: as `reach` takes them.
        """
        self._wrappers = wrappers
        self._originals = {id(new): (new, old) for old, new in wrappers.values()}
        self.reach(models, users)

    def reach(self, models: Iterable[nn.Module], users: Iterable[types.ModuleType] = ()) -> None:
        """Replace what these models, their submodules and the classes of these hold."""
        walk = _Walk(self._wrappers)
        for module in users:
            self._users.add(module)
            walk.through_globals(module)
        for model in models:
            walk.through(model)
        self._originals.update(walk.made)
        self._classes.update(walk.classes)

    def undo(
        self, users: Iterable[types.ModuleType] = (), kept: Collection[int] = ()
    ) -> list[nn.Module]:
        """Put the functions back, wherever the wrappers are held by now.

        Args:
            users: modules to look through beside those that use torch, or were given before.
            kept: the ids of the wrappers that the caller holds, each once, to use them again.

        Returns:
            The modules that held one.
        """
        originals, self._wrappers = self._originals, {}
        _drop_released(originals, kept)
        if originals:
            every = {*users_of_torch(), *self._users, *users}
            _undo_in(every, list(self._classes), originals)
            _drop_released(originals, kept)
        walk = _Walk(originals)
        modules = instances(nn.Module) if originals else []
        held = [module for module in modules if walk.through(module)]
        # Last, for a call after an interrupt is to find what is left.
        self._originals = {}
        self._classes.clear()
        self._users.clear()
        return held


def _undo_in(
    users: Iterable[types.ModuleType], classes: Iterable[type], originals: Replacements
) -> None:
    """Put functions back in globals and classes; nothing of the walk lives on, see below."""
    walk = _Walk(originals)
    for module in users:
        walk.through_globals(module)
    for owner in classes:
        walk.through(owner)


def _drop_released(pairs: dict[int, tuple[Any, Any]], kept: Collection[int]) -> None:
    """Delete the pairs to whose first object nothing refers but the pair, and who keeps it.

    A tuple was added after the wrappers that it holds, and so is asked before them.
    """
    nobodys = (object(), None)
    unused = sys.getrefcount(nobodys[0])
    for key in reversed(list(pairs)):
        if sys.getrefcount(pairs[key][0]) <= unused + (key in kept):
            del pairs[key]


class _Walk:
    """One way through what some objects hold, and through all that these hold.

    Args:
        replacements: ``id(old) -> (old, new)``.

    Attributes:
        made: ``id(new) -> (new, old)`` of plain tuples and static methods that got replaced.
        classes: of modules, and their bases; torch's are not looked through.
    """

    def __init__(self, replacements: Replacements) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}
        self.classes: set[type] = set()
        self._kinds: set[type] = set()
        self._replacements = replacements
        self._rebuilt: dict[int, tuple[Any, Any]] = {}
        self._seen: set[int] = set()
        self._waiting: list[Any] = []

    def through_globals(self, module: types.ModuleType) -> None:
        """Look through a module's globals, but the functions and classes that it imported."""
        own = vars(module)
        for name, value in list(own.items()):
            kind = type(value)
            if kind is types.FunctionType:
                is_own = value.__globals__ is own
                if _is_bare(value) if is_own else not (value.__closure__ and _is_torchs(value)):
                    continue
            # Most globals: asked first, for a process may have a hundred thousand.
            if kind in _HOLDS_NOTHING and id(value) not in self._replacements:
                continue
            if not name.startswith("__"):
                self._replace(own, name, value)
        self._look_through_waiting()

    def through(self, holder: Any) -> bool:
        """Look through an object; return whether anything was replaced."""
        self._waiting.append(holder)
        return self._look_through_waiting()

    def _look_through_waiting(self) -> bool:
        replaced = 0
        while self._waiting:
            holder = self._waiting.pop()
            if id(holder) not in self._seen:
                self._seen.add(id(holder))
                replaced += sum(self._replace(*place) for place in self._places(holder))
        return replaced > 0

    def _replace(self, holder: Any, key: Any, value: Any) -> bool:
        new = self._for(value)
        if new is value:
            return False
        # A table that a user imported may be torch's own. (The dict of a module is never waiting.)
        if id(holder) in self._seen and id(holder) in self._containers_of_torch:
            return False
        if isinstance(holder, type) and not hasattr(value, "__get__") and callable(new):
            # A builtin in a class is no method of it; a function in its place would be.
            new = self._remember(value, staticmethod(new))
        put(holder, key, new)
        return True

    def _for(self, value: Any) -> Any:
        """Return what is to stand for a value, most often itself, to be looked through later."""
        found = self._replacements.get(id(value)) or self._rebuilt.get(id(value))
        if found is not None and found[0] is value:
            return found[1]
        kind = type(value)
        if kind is types.FunctionType:  # most of what is looked through is
            if not _is_bare(value):
                self._waiting.append(value)
            return value
        if issubclass(kind, tuple):
            return self._for_tuple(value)
        if issubclass(kind, (staticmethod, classmethod)):
            function = self._for(value.__func__)
            return value if function is value.__func__ else self._remember(value, kind(function))
        if issubclass(kind, _HOLDERS) or hasattr(kind, "__dataclass_fields__"):
            self._waiting.append(value)
        return value

    def _for_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if tuple.__len__(value) > _LONGEST:
            return value
        old = list(tuple.__iter__(value))
        if self._are_plain(old):
            return value
        new = [self._for(item) for item in old]
        if all(map(operator.is_, new, old)):
            return value
        made: tuple[Any, ...] = self._remember(value, tuple.__new__(type(value), new))
        return made

    def _are_plain(self, values: list[Any]) -> bool:
        """Tell whether values neither are replaced nor hold anything; no loop of Python's."""
        holds_nothing = _HOLDS_NOTHING.issuperset(map(type, values))
        return holds_nothing and self._replacements.keys().isdisjoint(map(id, values))

    def _remember(self, old: Any, new: Any) -> Any:
        self._rebuilt[id(old)] = (old, new)
        if _is_plain(old):
            self.made[id(new)] = (new, old)
        return new

    def _places(self, holder: Any) -> Iterable[Place]:
        """Return where an object holds what; have its classes and submodules looked through."""
        if isinstance(holder, nn.Module):
            return self._places_of_module(holder)
        if isinstance(holder, types.MethodType):
            self._waiting.append(holder.__func__)
            return ()
        if isinstance(holder, types.FunctionType):
            return self._places_of_function(holder)
        if isinstance(holder, functools.partial):
            self._waiting.append(holder.keywords)
            return [(holder, "func", holder.func), (holder, "args", holder.args)]
        places = _places_in(holder)
        return () if self._are_plain([value for _, _, value in places]) else places

    def _places_of_module(self, module: nn.Module) -> Iterable[Place]:
        if is_set_up(module):
            self._waiting.extend(module._modules.values())
        if type(module) not in self._kinds:
            self._kinds.add(type(module))
            owners = [kind for kind in type(module).__mro__ if not is_left_alone(kind.__module__)]
            self.classes.update(owners)
            self._waiting += owners
        own = vars(module)
        return [(own, name, own[name]) for name in own.keys() - _OF_EVERY_MODULE]

    def _places_of_function(self, function: types.FunctionType) -> Iterator[Place]:
        if is_left_alone(function.__globals__.get("__name__", "")):
            # torch's, or a wrapper of this package's, perhaps around one of the user's.
            inner = vars(function).get("__wrapped__")
            if isinstance(inner, types.FunctionType):
                self._waiting.append(inner)
            yield from _places_in_torchs(function)
            return
        if function.__defaults__:
            yield function, "__defaults__", function.__defaults__
        if function.__kwdefaults__:
            self._waiting.append(function.__kwdefaults__)
        yield from (place for _, place in _closed_over(function))

    @functools.cached_property
    def _containers_of_torch(self) -> dict[int, Any]:
        return _containers_of_torch(imported())


@functools.lru_cache(maxsize=1)
def _containers_of_torch(_: Imported) -> dict[int, Any]:
    """Return torch's own tables by their ids, until another module is imported.

    A user may have imported them. They are kept, or another object might get the id of one.
    """
    torchs = [vars(module) for name, module in sys.modules.items() if is_left_alone(name)]
    values = list(itertools.chain.from_iterable(map(dict.values, torchs)))
    # no loop of Python's, for they are very many
    kinds = {found for found in set(map(type, values)) if issubclass(found, _CONTAINERS)}
    tables = itertools.compress(values, map(kinds.__contains__, map(type, values)))
    return {id(table): table for table in tables}


def _is_bare(function: types.FunctionType) -> bool:
    """Tell whether a function holds nothing that it could be given: most of a module's."""
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def _is_torchs(function: types.FunctionType) -> bool:
    """Tell what torch has made of another function from one that a module has imported."""
    return is_left_alone(function.__globals__.get("__name__", ""))


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Place]]:
    """Yield the variables of a function's closure: their names, and where their values are."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            value = cell.cell_contents
        except ValueError:  # of a variable that was not set yet
            continue
        yield name, (cell, "cell_contents", value)


def _places_in_torchs(function: types.FunctionType) -> Iterator[Place]:
    """Yield where a function that torch has made of another one holds it."""
    yield from (place for name, place in _closed_over(function) if name in _CLOSED_OVER)
    own = vars(function)
    yield from ((own, name, own[name]) for name in _TRACED if name in own)


def _places_in(holder: Any) -> Iterable[Place]:
    """Return where a container, a class or an object with fields holds what."""
    if isinstance(holder, dict):
        if dict.__len__(holder) <= _LONGEST:
            return [(holder, key, value) for key, value in dict.items(holder)]
    elif isinstance(holder, list):
        if list.__len__(holder) <= _LONGEST:
            return [(holder, index, value) for index, value in enumerate(list.__iter__(holder))]
    elif isinstance(holder, (type, types.SimpleNamespace)):
        return [(holder, name, value) for name, value in vars(holder).items()]
    elif dataclasses.is_dataclass(holder) and not is_left_alone(type(holder).__module__):
        names = [field.name for field in dataclasses.fields(holder)]
        return [(holder, name, _attribute(holder, name)) for name in names]
    return ()


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute as `patching.put` sets it, whatever the class overrides.

    A configuration of transformers refuses to be asked for what differs from layer to layer.
    """
    try:
        return object.__getattribute__(holder, name)
    except Exception:  # never set, or a property that raises: no place of a function
        return None


def _is_plain(value: Any) -> bool:
    """Tell whether keeping a value keeps nothing alive that a user may want to be gone."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, (staticmethod, classmethod)):
        return _is_plain(value.__func__)
    if isinstance(value, types.FunctionType):
        return is_left_alone(value.__globals__.get("__name__", ""))
    return isinstance(value, _PLAIN)
