"""Deep copies of models that are stored in half: they hold fp32 values, the exact ones.

A copy is what one averages in, evaluates, exports or keeps as the best so far, and has no masters.
Knows models in half and their fp32 values; no optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.distributed.shards import set_data
from amp_patch.levels import HALVES
from amp_patch.patching import Patches

from .fp32_values import FP32Values

#: The key of a `_Copying` in the memo of ``copy.deepcopy``.
_COPYING = "amp_patch"


class ExactCopies:
    """Makes them.

    Args:
        values: the fp32 values.
        models: returns the models that are stored in half.
        note_writes: has `FP32Values` know what was written by ``.data``.
    """

    def __init__(
        self,
        values: FP32Values,
        models: Callable[[], Iterable[nn.Module]],
        note_writes: Callable[[], None],
    ) -> None:
        self._values, self._models, self._note_writes = values, models, note_writes

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Return, for each method by its path, what makes its replacement."""
        return {
            "torch.nn.parameter.Parameter.__deepcopy__": self._exact,
            "torch.Tensor.__deepcopy__": self._exact,
        }

    def follow(self, models: Iterable[nn.Module], patches: Patches) -> None:
        """Copy parameters of a user's own class exactly, whose ``__deepcopy__`` is its own, too.

        Args:
            models: those that are stored in half now.
            patches: undoes what is replaced.
        """
        for own in {type(one) for model in models for one in _tensors_of(model)}:
            owner = next(base for base in own.__mro__ if "__deepcopy__" in vars(base))
            found = vars(owner)["__deepcopy__"]
            if isinstance(found, FunctionType) and found.__globals__ is not globals():
                patches.replace(owner, "__deepcopy__", self._exact(found))

    def exact_values(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the fp32 values of those that are weights and buffers in half, by their ids."""
        halves = [one for one in tensors if one.dtype in HALVES]
        owners = self._owners() if halves else {}
        if not any(id(one) in owners for one in halves):
            return {}
        self._values.handed_out.take_over()
        self._note_writes()
        return {id(one): self._values.exact(one) for one in halves if self._values.holds(one)}

    def _exact(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def deepcopy(tensor: Any, memo: dict[Any, Any]) -> Any:
            # A user's class that a tensor's class derives from may have the method: then what is
            # copied need be no tensor.
            if not isinstance(tensor, Tensor) or tensor.dtype not in HALVES:
                return original(tensor, memo)
            if _COPYING not in memo:
                self._values.handed_out.take_over()
                self._note_writes()
                memo[_COPYING] = _Copying(self._owners())
            copying = memo[_COPYING]
            copied = self._copied_master(tensor, copying, memo)
            if copied is None:
                copied = original(tensor, memo)
                if copied is not tensor:  # else a class says that it is shared with the copy
                    self._note(tensor, copied, copying, memo)
            return copied

        return deepcopy

    def _copied_master(
        self, tensor: Tensor, copying: _Copying, memo: dict[Any, Any]
    ) -> Tensor | None:
        """Return the copy that an optimizer, which was copied before the model, has of a master."""
        master = self._values.value_of(tensor)
        if master is None or not copying.has_owner_of(tensor, memo):
            return None
        copied: Tensor | None = memo.get(id(master))
        if copied is not None:
            set_data(copied, self._values.exact(tensor).to(torch.float32, copy=True))
        return copied

    def _note(
        self, tensor: Tensor, copied: Tensor, copying: _Copying, memo: dict[Any, Any]
    ) -> None:
        """Let the copies of a model's weights and buffers be exact, if the model is copied, too.

        Copied without it they stay as they are: a graph, say, is made for the dtype. A list of
        weights may be copied before their model; then they are made exact with the model's others.
        An optimizer that is copied along steps the copy where it has stepped the master.
        """
        if id(tensor) not in copying.owners:
            return
        copying.waiting.append((tensor, copied))
        waiting, copying.waiting = copying.waiting, []
        for one, its_copy in waiting:
            if copying.has_owner_of(one, memo):
                set_data(its_copy, self._values.exact(one).to(torch.float32, copy=True))
                master = self._values.value_of(one)
                if master is not None:
                    memo.setdefault(id(master), its_copy)
            else:
                copying.waiting.append((one, its_copy))

    def _owners(self) -> dict[int, list[nn.Module]]:
        """Return the modules that have a weight or buffer, or have one that has it, by its id."""
        owners: dict[int, list[nn.Module]] = {}
        for model in self._models():
            for module in model.modules():
                for tensor in _tensors_of(module):
                    owners.setdefault(id(tensor), []).append(module)
        return owners


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


class _Copying:
    """One deep copy of something.

    Attributes:
        owners: see `ExactCopies`.
        waiting: half weights and buffers whose modules are not copied yet, with their copies.
    """

    def __init__(self, owners: dict[int, list[nn.Module]]) -> None:
        self.owners = owners
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def has_owner_of(self, tensor: Tensor, memo: dict[Any, Any]) -> bool:
        """Return whether a module that has a weight or buffer is copied."""
        return any(id(module) in memo for module in self.owners.get(id(tensor), ()))
