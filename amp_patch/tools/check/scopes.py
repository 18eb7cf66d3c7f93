"""Where the names of a script are kept: the module's, and those of each call of a function."""

from __future__ import annotations

import builtins

from .values import Guards, Imported, Slots, Value


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
            scope = scope.parent
