"""Tables of modules that are held weakly, and told apart by identity.

`weakref.WeakKeyDictionary` compares a module with itself by its ``==``, which its class may define:
that of tensordict's ``TensorDictParams`` returns tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
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
