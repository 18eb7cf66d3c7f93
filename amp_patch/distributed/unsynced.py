"""Which models have left the gradients of their last backward on this rank alone.

``no_sync()`` of `DistributedDataParallel` and of FSDP1, and FSDP2's
``set_requires_gradient_sync(False)`` and ``set_requires_all_reduce(False)`` do that, until a later
backward shares the sum. Nothing may be decided by what one rank has until then. And which wrappers
are about to share for the first time, when the ranks compare what they have. Knows modules of
torch; no optimizer, no scale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_patch.common.weak_modules import ModuleTable, WeakModules

from . import flat_parameters, fully_sharded

DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
#: The module whose stages of a pipeline call a `DistributedDataParallel`, if one is imported.
STAGES = "torch.distributed.pipelining.stage"


class Unsynced:
    """The models of which that may be so; false where there never were any.

    Args:
        begun: returns how many backwards have begun.

    Attributes:
        has_new: whether there may be wrappers that have not shared gradients yet.
    """

    def __init__(self, begun: Callable[[], int]) -> None:
        self._begun = begun
        self._has_any = self.has_new = False
        # whether a wrapper's next backward is local, or the last was; None before the first forward
        self._wrapped: ModuleTable[bool | None] = ModuleTable()
        # how many backwards had begun at the last forward whose backward shares
        self._armed: ModuleTable[int] = ModuleTable()
        self._new = WeakModules()
        self._sharded = WeakModules()
        self._flat = WeakModules()

    def __bool__(self) -> bool:
        return self._has_any

    def follow(self, models: Iterable[nn.Module]) -> None:
        """Models were initialized: sharded by FSDP2 or FSDP1, in a wrapper, or neither."""
        for model in models:
            self._sharded.update(fully_sharded.sharded_modules(model))
            self._flat.update(flat_parameters.flat_modules(model))
            self._has_any |= bool(self._sharded or self._flat)
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    self._watch(module)

    def noting(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return an ``__init__`` of `DistributedDataParallel` that notes what it makes."""
        weak = weakref.ref(self)

        @functools.wraps(original)
        def noting_init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            original(wrapper, *args, **kwargs)
            alive = weak()
            if alive is not None:
                alive._watch(wrapper)

        return noting_init

    def noting_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``_pre_forward`` of `DistributedDataParallel` that notes whether it shares.

        Its forward begins with that, and so does that of a module to which `replicate` of
        ``torch.distributed._composable`` was applied, which never calls the wrapper in it.
        """
        weak = weakref.ref(self)

        @functools.wraps(original)
        def noting(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            alive = weak()
            if alive is not None:
                alive.note(wrapper)
            return original(wrapper, *args, **kwargs)

        return noting

    def noting_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward of a pipeline's stage that notes whether it has shared gradients.

        Each forward of a `DistributedDataParallel` is under ``no_sync()`` there. The backward of
        the last micro-batch shares the sum of all of them nevertheless.
        """
        weak = weakref.ref(self)

        @functools.wraps(original)
        def noting(stage: Any, *args: Any, last_backward: bool = False, **kwargs: Any) -> Any:
            result = original(stage, *args, last_backward=last_backward, **kwargs)
            alive = weak()
            if alive is not None and stage.submod in alive._wrapped:
                alive._wrapped[stage.submod] = not last_backward
            return result

        return noting

    def _watch(self, wrapper: nn.Module) -> None:
        if wrapper not in self._wrapped:
            self._wrapped[wrapper], self._has_any = None, True
            self._new.add(wrapper)
            self.has_new = True

    def take_new(self, params: Iterable[Tensor], stepped: Iterable[Tensor]) -> list[Any]:
        """Return new wrappers of some parameters whose next backward shares; each once.

        Args:
            params: that this backward is of.
            stepped: by any optimizer that was prepared; wrappers of others are new to nobody.
        """
        now, ever = set(map(id, params)), set(map(id, stepped))
        found = []
        for wrapper, is_local in list(self._wrapped.items()):
            if wrapper in self._new:
                own = set(map(id, wrapper.parameters()))
                if own.isdisjoint(ever):
                    self._new.discard(wrapper)
                elif is_local is False and not own.isdisjoint(now):
                    self._new.discard(wrapper)
                    found.append(wrapper)
        self.has_new = bool(self._new)
        return found

    def averaged_among(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return those of some parameters whose gradients a `DistributedDataParallel` averages.

        Not among them are what it was told to leave out, as the experts of a rank.
        """
        averaged = {id(param) for wrapper in list(self._wrapped) for param in _averaged_by(wrapper)}
        return [param for param in params if id(param) in averaged]

    def left(self, params: Iterable[Tensor]) -> bool:
        """Return whether the last backward has left gradients of some parameters here."""
        own = set(map(id, params))
        local = [wrapper for wrapper, is_local in list(self._wrapped.items()) if is_local]
        local += [one for one in list(self._flat) if flat_parameters.keeps_gradients(one)]
        left = chain(
            (param for module in local for param in module.parameters()),
            chain.from_iterable(map(fully_sharded.unshared, list(self._sharded))),
        )
        return any(id(param) in own for param in left)

    def note(self, wrapper: Any) -> None:
        """A forward begins: it decides whether the backward that follows shares, if it is watched.

        A copy of a wrapper is not. A forward without gradients decides nothing; of several before
        one backward, one that shares is enough.
        """
        if wrapper not in self._wrapped or not torch.is_grad_enabled():
            return
        begun = self._begun()
        if wrapper.require_backward_grad_sync:
            self._wrapped[wrapper], self._armed[wrapper] = False, begun
        elif self._armed.get(wrapper) != begun:
            self._wrapped[wrapper] = True


def _averaged_by(wrapper: Any) -> Iterator[Tensor]:
    left_out = getattr(wrapper, "parameters_to_ignore", ())  # apex's has none
    for name, param in wrapper.module.named_parameters():
        if name not in left_out:
            yield param
