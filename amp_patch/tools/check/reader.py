"""Where a reading of a script is, and what all parts of it do with values and names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable

from . import names
from .guards import NO_GUARDS, Guard, Guards, contradict
from .trace import Block, Call, Trace
from .values import (
    Arguments,
    Cast,
    Choice,
    Class,
    Const,
    Function,
    Imported,
    Instance,
    Items,
    Made,
    Member,
    Module,
    Partial,
    Scope,
    Super,
    Table,
    Value,
    Wrapper,
    alternatives,
    option,
    root,
)

#: Elements of a list that a loop over it is read for.
MOST_ELEMENTS = 6


class Reader:
    """The state of a reading: the scope, the branches and loops that it is in, and the trace.

    Attributes:
        guards: the branches that lead to where the reading is.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self.scope = Scope()
        self.guards: Guards = NO_GUARDS
        self.blocks: tuple[Block, ...] = ()
        self.regions: tuple[str, ...] = ()
        self.loops: tuple[tuple[ast.AST, int], ...] = ()
        self.run = 0

    def call(self, callee: Value, arguments: Arguments, node: ast.AST) -> Value:
        """Return what a call returns; see `Calls`."""
        raise NotImplementedError

    def yielded(self, value: Value) -> None:
        """A function yields; see `Statements`."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr | None) -> Value:
        """Return what an expression stands for; see `Expressions`."""
        raise NotImplementedError

    def note(
        self, name: str, node: ast.AST, arguments: Arguments, receiver: Value | None = None
    ) -> Call:
        """Append a call to the trace."""
        call = Call(
            name,
            node,
            receiver,
            arguments,
            self.guards,
            tuple(one for one in self.blocks if not contradict(one.call.guards, self.guards)),
            self.regions,
            self.loops,
            len(self.trace.calls),
            self.run,
        )
        self.trace.append(call)
        return call

    def under(self, guards: Guards, read: Callable[[], Value]) -> Value:
        """Return what is read in a branch."""
        before = self.guards
        self.guards = before | guards
        try:
            return read()
        finally:
            self.guards = before

    def for_each(self, value: Value, read: Callable[[Value], Value]) -> Value:
        """Return what is read of a value; of a `Choice`, of each that it may be."""
        if not isinstance(value, Choice):
            return read(value)
        results = []
        for condition, one in alternatives(value, self.guards):
            results.append((condition, self.under(condition, functools.partial(read, one))))
        if not results:
            return Value()
        return results[0][1] if len(results) == 1 else Choice(results)

    def attribute(self, owner: Value, name: str) -> Value:
        """Return ``owner.name``."""
        return self.for_each(owner, lambda one: self._attribute(one, name))

    def _attribute(self, owner: Value, name: str) -> Value:
        is_defined = isinstance(owner, Module) and name in owner.attrs
        if isinstance(owner, Imported) and not is_defined:
            return Imported(f"{owner.dotted}.{name}")
        if name in owner.attrs and not isinstance(owner, Class):
            inherited = self._of_class(owner, name) if isinstance(owner, Instance) else None
            known = owner.attrs.read(name, self.guards, inherited)
            if known is not None:
                return known
        if isinstance(owner, Wrapper) and name == "module":
            return owner.base
        if isinstance(owner, Cast) and isinstance(root(owner), Instance):
            return self._attribute(owner.base, name)
        found = self._by_class(owner, name)
        if found is not None:
            return found
        member = Member(owner, name)
        owner.attrs.write(name, NO_GUARDS, member)
        return member

    def _by_class(self, owner: Value, name: str) -> Value | None:
        """Return what a class, that of an object, or its bases for ``super()``, have by a name."""
        if isinstance(owner, Super):
            classes = [one for base in owner.bases for one in _ancestry(base)]
            return self._of_classes(owner.owner, classes, name)
        if isinstance(owner, Class):
            slots = (one.attrs for one in owner.ancestry() if isinstance(one, Class))
            values = (one.read(name, self.guards) for one in slots)
            found = next((one for one in values if one is not None), None)
            return found.bound_to_class(owner) if isinstance(found, Function) else found
        return self._of_class(owner, name) if isinstance(owner, Instance) else None

    def _of_class(self, owner: Instance, name: str) -> Value | None:
        return self._of_classes(owner, owner.cls.ancestry(), name)

    def _of_classes(self, owner: Instance, classes: Iterable[Value], name: str) -> Value | None:
        for base in classes:
            found = base.attrs.read(name, self.guards) if isinstance(base, Class) else None
            if isinstance(found, Function):
                method = found.bound_to(owner)
                if found.is_decorated_by("builtins.property"):
                    return self.call(method, Arguments(), method.node)
                if found.is_decorated_by("functools.cached_property"):
                    return self._cached(owner, name, method)
                return method
            if found is not None:
                return found
        return None

    def _cached(self, owner: Instance, name: str, method: Function) -> Value | None:
        if name not in owner.attrs:
            value = self.call(method, Arguments(), method.node)
            owner.attrs.write(name, NO_GUARDS, value)
        return owner.attrs.read(name, self.guards)

    def elements(self, value: Value) -> list[Value] | None:
        """Return what a loop over a value gets one by one; None where that is not known."""
        if isinstance(value, Choice):
            found = [self.elements(one) for _, one in alternatives(value, self.guards)]
            return next((one for one in found if one is not None), None)
        if isinstance(value, Items):
            return value.items
        if isinstance(value, Table):
            return [Const(ast.literal_eval(key)) for key in value.entries if _is_literal(key)]
        return None

    def item(self, owner: Value, index: Value) -> Value:
        """Return ``owner[index]``."""
        if isinstance(owner, Items) and isinstance(index, Const) and isinstance(index.value, int):
            try:
                return owner.items[index.value]
            except IndexError:
                return Value(parts=[owner])
        if isinstance(owner, Table) and index.key in owner.entries:
            return owner.entries[index.key]
        if isinstance(owner, Table) and _is_registry(owner) and not isinstance(index, Const):
            entries = owner.entries.items()
            return Choice([(frozenset({Guard(index.key, k, True)}), one) for k, one in entries])
        name = f"[{index.key}]"
        known = owner.attrs.read(name, self.guards)
        if known is None:
            known = Value(f"{owner.key}{name}", [owner, index])
            owner.attrs.write(name, NO_GUARDS, known)
        return known

    def assign(self, target: ast.expr, value: Value) -> None:
        """Bind what stands left of ``=``."""
        if isinstance(target, ast.Name):
            self.scope.write(target.id, self.guards, value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            self.note(f"={target.attr}", target, Arguments([value]), owner)
            for condition, one in alternatives(owner, self.guards):
                held = option(value) if _is_config(one) else value
                one.attrs.write(target.attr, self.guards | condition, held)
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value)
            self.note("=[]", target, Arguments([value]), owner)
            self._assign_item(owner, self.evaluate(target.slice), value)

    def _assign_item(self, owner: Value, index: Value, value: Value) -> None:
        for _, one in alternatives(owner, self.guards):
            if isinstance(one, Table):
                one.entries[index.key] = value
            else:
                one.attrs.write(f"[{index.key}]", self.guards, value)

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        if isinstance(value, Choice):
            parts = [(g, one) for g, one in alternatives(value, self.guards)]
            for condition, one in parts:
                before = self.guards
                self.guards = before | condition
                self._unpack(targets, one)
                self.guards = before
            return
        items = self.elements(value)
        starred = any(isinstance(target, ast.Starred) for target in targets)
        for number, target in enumerate(targets):
            if items is not None and not starred and number < len(items):
                self.assign(target, items[number])
            else:
                self.assign(target, self.item(value, Const(number)) if not starred else value)


def _ancestry(base: Value) -> Iterable[Value]:
    return base.ancestry() if isinstance(base, Class) else [base]


def _is_config(value: Value) -> bool:
    """Return whether an object holds options: what the script assigns to them are defaults."""
    if isinstance(value, Instance):
        return any(
            isinstance(b, Imported) and names.is_config(b.dotted) for b in value.cls.ancestry()
        )
    return isinstance(value, Made) and names.is_config(value.dotted)


def _is_registry(table: Table) -> bool:
    """Return whether a dict has functions and classes by name: what is looked up is one of them."""
    held = table.entries.values()
    return bool(held) and all(isinstance(v, Class | Function | Imported | Partial) for v in held)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True
