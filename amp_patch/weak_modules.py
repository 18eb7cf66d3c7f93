"""Tables and sets of modules that are held weakly, and told apart by identity.

`weakref.WeakKeyDictionary` and `weakref.WeakSet` compare modules by their ``==``, which a class may
define: two networks of one dataclass are equal, and that of tensordict's ``TensorDictParams``
returns tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from typing import TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

Value = TypeVar("Value")


class _ModuleRef(WeakIdRef):
    """A reference that asks no module whether it is a tensor, as torch's does for a microsecond."""

    __call__ = weakref.ref.__call__


def table_of_modules() -> MutableMapping[nn.Module, Value]:
    """Return an empty table, of which an entry goes with its module."""
    table: MutableMapping[nn.Module, Value] = WeakIdKeyDictionary(ref_type=_ModuleRef)
    return table


class WeakModules(MutableSet[nn.Module]):
    """A set that keeps none of its modules alive; they stand in the order in which they came."""

    def __init__(self) -> None:
        self._table: MutableMapping[nn.Module, None] = table_of_modules()

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
