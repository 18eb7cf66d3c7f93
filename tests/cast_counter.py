"""Counts the casts that are dispatched in a block; it knows nothing of amp_patch.

A cast is an operator whose floating result has a dtype that none of its floating inputs has, or a
``copy_`` between two floating dtypes. An addition of a half and a float tensor is none: it reads
both as they are. The multi-tensor copy that refreshes many casts at once is counted apart.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BULK_COPY = torch.ops.aten._foreach_copy_.default
COPY = torch.ops.aten.copy_.default


def _floating(tree: object) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _cast_source(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Tensor | None:
    """Return the tensor that an operator cast, or None if it was no cast."""
    sources = inputs[1:] if func is COPY else inputs
    if not sources or not outputs or outputs[0].dtype in {source.dtype for source in sources}:
        return None
    return sources[0]


class CastCounter(TorchDispatchMode):
    """Counts while it is entered, and goes on counting when it is entered again.

    Args:
        weights: tensors whose casts, and those of their views, are counted in ``of_weights`` too.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.casts = 0
        self.of_weights = 0
        self.bulk_copies = 0
        self._storages = {_storage(weight) for weight in weights}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func is BULK_COPY:
            self.bulk_copies += 1
            return result
        source = _cast_source(func, _floating((args, kwargs)), _floating(result))
        if source is not None:
            self.casts += 1
            self.of_weights += _storage(source) in self._storages
        return result


def _storage(tensor: Tensor) -> int:
    """Identify the storage, which a fake tensor has too, though at no address."""
    return tensor.untyped_storage()._cdata
