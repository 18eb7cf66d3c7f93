"""What a state dict has of half tensors: fp32 copies, of which writes are to reach the model.

``own = model.state_dict(); own[name].copy_(value)`` loads a part of a state, for torch's dict has
the very tensors of the model. Knows no values, and no optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from amp_patch.distributed.shards import place, version_of


class HandedOut:
    """The copies in the last state dict of each module, until the model is used.

    Args:
        enter: called with a half tensor and what was written to its copy.

    Attributes:
        are_held: whether a state dict was made since the last use; each forward asks.
    """

    def __init__(self, enter: Callable[[Tensor, Tensor], None]) -> None:
        self._enter = enter
        self.are_held = False
        # half tensor, copy, version of the copy
        self._copies: weakref.WeakKeyDictionary[nn.Module, list[tuple[Tensor, Tensor, int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._places: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()

    def add(self, module: nn.Module, tensor: Tensor, handed: Tensor) -> None:
        """A state dict gets a copy of a half tensor of a module; it is held until `take_over`."""
        if not handed.is_inference():  # which nobody may write to, and has no version
            self._copies.setdefault(module, []).append((tensor, handed, version_of(handed)))
            self.are_held = True

    def note(self, module: nn.Module, value: Tensor) -> None:
        """A state dict gets an fp32 value of a module, a copy or a master; see `has`."""
        self._places.setdefault(module, set()).add(place(value))
        self.are_held = True

    def has(self, tensor: Tensor) -> bool:
        """Return whether a state dict has got a tensor as an fp32 value since the last use."""
        if not self.are_held:
            return False
        return any(place(tensor) in places for places in self._places.values())

    def take_over(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Enter what was written to copies, and let go of these.

        Args:
            modules: whose; None: all.
        """
        used = [*self._copies, *self._places] if modules is None else list(modules)
        found = [self._copies.pop(one, []) for one in used]
        for one in used:
            self._places.pop(one, None)
        self.are_held = bool(self._copies or self._places)
        # What is kept of them must be no inference tensors, nor what torch.func wraps.
        with torch.inference_mode(False), torch._C._DisableFuncTorch(), torch.no_grad():
            for tensor, handed, version in (copied for copies in found for copied in copies):
                if version_of(handed) != version:
                    self._enter(tensor, handed)
