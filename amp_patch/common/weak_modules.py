"""Tables and sets of modules that are held weakly, and told apart by identity.

`weakref.WeakKeyDictionary` and `weakref.WeakSet` compare modules by their ``==``, which a class may
define: two networks of one dataclass are equal, and that of tensordict's ``TensorDictParams``
returns tensors. The dictionary of `torch.utils.weak` takes five times as long to look one up.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from typing import Any, TypeVar

from torch import nn

Value = TypeVar("Value")


class ModuleTable(MutableMapping[nn.Module, Value]):
    """A dictionary by modules, of which an entry goes with its module; not to be copied."""

    def __init__(self) -> None:
        # id of the module -> (weak reference, value); the reference takes the entry away when the
        # module is freed, before another one can have its id
        self._entries: dict[int, tuple[weakref.ref[nn.Module], Value]] = {}

    def __getitem__(self, module: nn.Module) -> Value:
        return self._entries[id(module)][1]

    def __setitem__(self, module: nn.Module, value: Value) -> None:
        key = id(module)
        reference = weakref.ref(module, functools.partial(self._entries.pop, key))
        self._entries[key] = reference, value

    def __delitem__(self, module: nn.Module) -> None:
        del self._entries[id(module)]

    def __contains__(self, module: object) -> bool:
        return id(module) in self._entries

    def __iter__(self) -> Iterator[nn.Module]:
        """Go through the modules that live, in the order in which they came."""
        for reference, _ in list(self._entries.values()):
            module = reference()
            if module is not None:
                yield module

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Take all entries away."""
        self._entries.clear()

    def get(self, module: nn.Module, default: Any = None) -> Any:
        """Return what a module has, or ``default``."""
        entry = self._entries.get(id(module))
        return default if entry is None else entry[1]


class WeakModules(MutableSet[nn.Module]):
    """A set that keeps none of its modules alive; they stand in the order in which they came."""

    def __init__(self) -> None:
        self._table: ModuleTable[None] = ModuleTable()

    def __contains__(self, module: object) -> bool:
        return module in self._table

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def add(self, module: nn.Module) -> None:
        """Add a module."""
        self._table[module] = None

    def discard(self, module: nn.Module) -> None:
        """Take a module away, if it is there."""
        self._table.pop(module, None)

    def update(self, modules: Iterable[nn.Module]) -> None:
        """Add several modules."""
        for module in modules:
            self.add(module)

    def new(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return those that are not in the set, each once."""
        found = {id(module): module for module in modules if module not in self}
        return list(found.values())
