"""What an expression of a script may stand for, as far as reading it tells; runs nothing.

A value is one object of the script, whatever names it has; so values are compared by identity. What
is known only in one branch of an ``if`` comes with guards: the answers that lead there.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .guards import NO_GUARDS, Guards, Truth, contradict, negated

#: A longer key is hashed: after ``x = x + f(x)`` that of x is more than twice as long.
_LONGEST_KEY = 2000


class Value:
    """An object of the script.

    Args:
        key: two values with the same key are equal, for all that is known.
        parts: what it was made from; these, and what they were made from, are its ``deps``.

    Attributes:
        attrs: what was assigned to its attributes, and, as ``"[key]"``, to its items.
        truth: when it is true, where that follows from something else.
        source: the call that returned it, a `trace.Call`.
        default: of an option of the command line or the environment, a parameter, ``get()``.
    """

    _numbers = itertools.count()

    def __init__(self, key: str = "", parts: Iterable[Value] = ()) -> None:
        self.key = key or f"?{next(self._numbers)}"
        if len(self.key) > _LONGEST_KEY:
            self.key = f"?{hash(self.key):x}"
        self.deps: frozenset[Value] = frozenset().union(*(_with_deps(part) for part in parts))
        self.attrs = Slots()
        self.truth: Truth | None = None
        self.source: Any = None
        self.default: Value | None = None


def _with_deps(part: Value) -> frozenset[Value]:
    if isinstance(part, Const | Imported | Function | Class):
        return part.deps
    return part.deps | {root(part)}


def option(default: Value) -> Value:
    """Return what may be something else than the literal that it is by default."""
    if not isinstance(default, Const):
        return default
    value = Value()
    value.default = default
    return value


class Const(Value):
    """A literal, or what is computed from literals; ``node`` is where it stands."""

    def __init__(self, value: Any, node: ast.AST | None = None) -> None:
        super().__init__(repr(value))
        self.value, self.node = value, node


class Imported(Value):
    """A module, or what is found in one, by its dotted name."""

    def __init__(self, dotted: str) -> None:
        super().__init__(dotted)
        self.dotted = dotted


class Module(Imported):
    """A module of the project, with what its file defines."""

    def __init__(self, dotted: str, scope: Scope) -> None:
        super().__init__(dotted)
        self.attrs = scope.names


class Function(Value):
    """A function of the script, with the object that it is a method of."""

    def __init__(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        scope: Scope,
        defaults: Mapping[str, Value],
        decorators: Sequence[Value] = (),
        owner: Value | None = None,
    ) -> None:
        super().__init__()
        self.node, self.scope, self.defaults = node, scope, defaults
        self.decorators, self.owner = decorators, owner

    def bound_to(self, owner: Value) -> Function:
        """Return the method of an object; a static method is bound to nothing."""
        if self.is_decorated_by("builtins.staticmethod"):
            return self
        if self.is_decorated_by("builtins.classmethod") and isinstance(owner, Instance):
            owner = owner.cls
        return Function(self.node, self.scope, self.defaults, self.decorators, owner)

    def bound_to_class(self, cls: Class) -> Function:
        """Return what a class gives by the name of a method: bound if it is a class method."""
        return self.bound_to(cls) if self.is_decorated_by("builtins.classmethod") else self

    def is_decorated_by(self, dotted: str) -> bool:
        """Return whether a decorator has that name."""
        return any(isinstance(one, Imported) and one.dotted == dotted for one in self.decorators)


class Class(Value):
    """A class of the script; ``fields`` are the names that it annotates, in order."""

    def __init__(self, name: str, bases: Sequence[Value], fields: Sequence[str]) -> None:
        super().__init__()
        self.name, self.bases, self.fields = name, bases, fields

    def ancestry(self, depth: int = 8) -> Iterator[Value]:
        """Yield the class and its bases, those of the script and those that it imports."""
        yield self
        for base in self.bases if depth else ():
            yield from base.ancestry(depth - 1) if isinstance(base, Class) else [base]


class Instance(Value):
    """An object of a class of the script; ``order`` is that of the call that comes next."""

    def __init__(self, cls: Class, parts: Iterable[Value] = (), order: int = 0) -> None:
        super().__init__(parts=parts)
        self.cls, self.order = cls, order


class Super(Value):
    """``super()`` in a method of a class of the script: the object, with what its bases define."""

    def __init__(self, owner: Instance, bases: Sequence[Value]) -> None:
        super().__init__(parts=[owner])
        self.owner, self.bases = owner, bases


class Made(Value):
    """What a call of something imported returned."""

    def __init__(self, dotted: str, key: str = "", parts: Iterable[Value] = ()) -> None:
        super().__init__(key, parts)
        self.dotted = dotted


class Items(Value):
    """A list, a tuple or a set."""

    def __init__(self, items: Iterable[Value]) -> None:
        self.items = list(items)
        super().__init__(parts=self.items)


class Table(Value):
    """A dict whose keys are literals, as far as they are."""

    def __init__(self, entries: Mapping[str, Value]) -> None:
        super().__init__(parts=entries.values())
        self.entries = dict(entries)


class Member(Value):
    """``owner.name``, where nothing more is known of it."""

    def __init__(self, owner: Value, name: str) -> None:
        super().__init__(f"{owner.key}.{name}", [owner])
        self.owner, self.name = owner, name


class Params(Value):
    """``owner.parameters()`` or the like."""

    def __init__(self, owner: Value) -> None:
        super().__init__(parts=[owner])
        self.owner = root(owner)


class Sum(Value):
    """What an addition, or a subtraction, of two values makes."""

    def __init__(self, key: str, terms: Sequence[Value]) -> None:
        super().__init__(key, terms)
        self.terms = terms


class Cast(Value):
    """``base`` in another dtype, ``"float16"`` say; a module is the same object then."""

    def __init__(self, base: Value, dtype: str) -> None:
        super().__init__(parts=[base])
        self.base, self.dtype = base, dtype


class Wrapper(Value):
    """A module or optimizer around another, ``DistributedDataParallel(base)``."""

    def __init__(self, base: Value, by: str) -> None:
        super().__init__(parts=[base])
        self.base, self.by = base, by


class Partial(Value):
    """``functools.partial(callee, ...)``."""

    def __init__(self, callee: Value, arguments: Arguments) -> None:
        super().__init__(parts=arguments.values())
        self.callee, self.arguments = callee, arguments


class Choice(Value):
    """One of several values, by the branch that was taken; a choice of choices is one of all."""

    #: Alternatives that are kept.
    MOST = 16

    def __init__(self, choices: Sequence[tuple[Guards, Value]]) -> None:
        super().__init__(parts=(value for _, value in choices))
        found: list[tuple[Guards, Value]] = []
        for condition, value in choices:
            inner = value.choices if isinstance(value, Choice) else [(NO_GUARDS, value)]
            found += [(condition | also, one) for also, one in inner]
        self.choices: list[tuple[Guards, Value]] = found[: self.MOST]


class Arguments:
    """Of a call.

    Attributes:
        is_open: there are more, ``*args`` or ``**kwargs`` of which nothing is known.
    """

    def __init__(
        self,
        positional: Sequence[Value] = (),
        keywords: Mapping[str, Value] | None = None,
        is_open: bool = False,
    ) -> None:
        self.positional, self.keywords = list(positional), dict(keywords or {})
        self.is_open = is_open

    def get(self, name: str, position: int) -> Value | None:
        """Return the argument of that name or place."""
        if name in self.keywords:
            return self.keywords[name]
        return self.positional[position] if position < len(self.positional) else None

    def values(self) -> list[Value]:
        """Return all of them."""
        return [*self.positional, *self.keywords.values()]

    def and_more(self, more: Arguments) -> Arguments:
        """Return these with others after them."""
        return Arguments(
            [*self.positional, *more.positional],
            {**self.keywords, **more.keywords},
            self.is_open or more.is_open,
        )


class Slots:
    """Names with what was assigned to each, and under which guards."""

    #: Alternatives that are kept of one name: the latest.
    MOST = 6

    def __init__(self) -> None:
        self._entries: dict[str, list[tuple[Guards, Value]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._entries)

    def write(self, name: str, guards: Guards, value: Value) -> None:
        """Assign where all of the guards hold."""
        entries = self._entries.setdefault(name, [])
        entries[:] = [entry for entry in entries if not guards <= entry[0]][-self.MOST :]
        entries.append((guards, value))

    def read(self, name: str, guards: Guards, otherwise: Value | None = None) -> Value | None:
        """Return what a name stands for where guards hold; a `Choice` where that is not certain.

        Args:
            name: as it was written.
            guards: of where it is read.
            otherwise: what it stands for where nothing was assigned.
        """
        found: list[tuple[Guards, Value]] = []
        passed = NO_GUARDS  # what holds where none of the later assignments was made
        for condition, value in reversed(self._entries.get(name, ())):
            rest = (condition - guards) | passed
            if contradict(rest, guards):
                continue
            found += [(rest | also, one) for also, one in alternatives(value, guards | rest)]
            if condition <= guards:
                break
            passed |= negated(condition - guards)
        else:
            if otherwise is not None and not contradict(passed, guards):
                found.append((passed, otherwise))
        if len(found) > 1:
            return Choice(found[: self.MOST])
        return found[0][1] if found else None


def alternatives(value: Value | None, guards: Guards = NO_GUARDS) -> Iterator[tuple[Guards, Value]]:
    """Yield each value that it may be where guards hold, with the further guards of each."""
    if isinstance(value, Choice):
        for condition, one in value.choices:
            if not contradict(condition, guards):
                yield condition - guards, one
    elif value is not None:
        yield NO_GUARDS, value


def root(value: Value) -> Value:
    """Return the object under casts and wrappers."""
    while isinstance(value, Cast | Wrapper):
        value = value.base
    return value


def flat(value: Value | None, guards: Guards = NO_GUARDS) -> Iterator[Value]:
    """Yield what a value may be; of lists and dicts, what is in them."""
    for _, one in alternatives(value, guards):
        if isinstance(one, Items):
            for item in one.items:
                yield from flat(item, guards)
        elif isinstance(one, Table):
            for item in one.entries.values():
                yield from flat(item, guards)
        else:
            yield one


class Scope:
    """The names of one call, of a class body or of the module.

    Args:
        parent: where names are looked up that are not here; None for the module.
    """

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.names = Slots()
        self._elsewhere: dict[str, Scope] = {}

    @property
    def module(self) -> Scope:
        """The module's scope."""
        return self if self.parent is None else self.parent.module

    def write(self, name: str, guards: Guards, value: Value) -> None:
        """Assign to a name."""
        self._elsewhere.get(name, self).names.write(name, guards, value)

    def read(self, name: str, guards: Guards) -> Value:
        """Return what a name stands for; an unknown value, always the same, if that is not seen."""
        scope: Scope | None = self
        while scope is not None:
            value = scope.names.read(name, guards)
            if value is not None:
                return value
            scope = scope.parent
        if hasattr(builtins, name):
            return Imported(f"builtins.{name}")
        unseen = Value(name)
        self.module.names.write(name, frozenset(), unseen)
        return unseen

    def declare_global(self, name: str) -> None:
        """``global name``."""
        self._elsewhere[name] = self.module

    def declare_nonlocal(self, name: str) -> None:
        """``nonlocal name``."""
        scope = self.parent
        while scope is not None:
            if name in scope.names:
                self._elsewhere[name] = scope
                return
            scope = scope.parent
