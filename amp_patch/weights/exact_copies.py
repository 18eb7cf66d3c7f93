"""Deep copies of models that are stored in half: they hold fp32 values, the exact ones.

A copy is what one averages in, evaluates, exports or keeps as the best so far, and has no masters.
Knows models in half and their fp32 values; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casting.mode import HALVES
from amp_patch.distributed.shards import set_data

from .fp32_values import FP32Values

#: What the memo of a deep copy has the owners by, see `ExactCopies`.
_OWNERS = "amp_patch"


class ExactCopies:
    """Makes them.

    Args:
        store: the fp32 values.
        models: returns the models that are stored in half.
    """

    def __init__(self, store: FP32Values, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._store, self._models = store, models

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for each method by its path, what makes its replacement."""
        return {
            "torch.nn.parameter.Parameter.__deepcopy__": self._exact,
            "torch.Tensor.__deepcopy__": self._exact,
        }

    def _exact(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def deepcopy(tensor: Tensor, memo: dict[Any, Any]) -> Any:
            copied = original(tensor, memo)
            if tensor.dtype in HALVES and self._is_in_copied(tensor, memo):
                set_data(copied, self._store.exact(tensor).to(torch.float32, copy=True))
            return copied

        return deepcopy

    def _is_in_copied(self, tensor: Tensor, memo: dict[Any, Any]) -> bool:
        """Return whether it is a weight or buffer of a module in half that is being copied.

        Copied without its module it stays as it is: a graph, say, is made for the dtype.
        """
        owners = memo.get(_OWNERS)
        if owners is None:
            memo[_OWNERS] = owners = self._owners()
        return any(id(module) in memo for module in owners.get(id(tensor), ()))

    def _owners(self) -> dict[int, list[nn.Module]]:
        """Return the modules of models in half, by the ids of their weights and buffers."""
        owners: dict[int, list[nn.Module]] = {}
        for model in self._models():
            for module in model.modules():
                for tensor in chain(module._parameters.values(), module._buffers.values()):
                    owners.setdefault(id(tensor), []).append(module)
        return owners
