"""What optimizers keep for each tensor that they step, while masters stand in a parameter's place.

Knows ``optimizer.state``, and what an optimizer of a user's has noted of parameters when it was
made, as a set of those that no weight decay is for; no groups, and no values of parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels.strips import in_order_of

#: So many other names may stand before the first parameter in what a state has under a name.
_FEW = 64


class SteppedState:
    """The state of optimizers that step the same tensors, as one that wraps another does.

    Args:
        optimizers: held weakly.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._noted: set[int] = set()
        self._nested: dict[int, tuple[int, list[dict[Any, Any]]]] = {}

    def move(self, old: Tensor, new: Tensor) -> None:
        """Enter the state of one tensor for another, if there is any, and what is noted of it."""
        is_back = id(old) in self._noted
        for optimizer in self._alive():
            if old in optimizer.state:
                _move(optimizer.state, old, new)
            for notes in [*_own_notes(optimizer, Tensor), *self._nested_in(optimizer)]:
                _note(notes, old, new, is_back)
            for notes in _own_notes(optimizer, int):
                _note(notes, id(old), id(new), is_back)
        if is_back:
            self._noted.discard(id(old))
        else:
            self._noted.add(id(new))

    def _nested_in(self, optimizer: Optimizer) -> list[dict[Any, Any]]:
        """Return what a state has of parameters under a name, beside other names, as TRAC's has."""
        state = optimizer.state
        size, dicts = self._nested.get(id(optimizer), (-1, []))
        if size != len(state):  # `move` leaves as many entries, of thousands
            others = [value for key, value in state.items() if not isinstance(key, Tensor)]
            dicts = [value for value in others if isinstance(value, dict)]
            self._nested[id(optimizer)] = len(state), dicts
        # A few other names come first. A dict of numbers alone must not be asked for a tensor.
        firsts = [itertools.islice(one, _FEW) for one in dicts]
        pairs = zip(dicts, firsts, strict=True)
        return [one for one, keys in pairs if any(isinstance(key, Tensor) for key in keys)]

    def follow_device(self, stepped: Tensor) -> None:
        """Bring what has the shape of a tensor to the device that it was moved to."""
        for own, key, value in self._alike(stepped):
            own[key] = value.to(stepped.device)

    def follow_order(self, stepped: Tensor) -> None:
        """Bring what has the shape of a tensor to its order of memory.

        torch's fused kernels go through both as they lie: on a CPU without a look, on a GPU they
        raise where the orders are two.
        """
        for own, key, value in self._alike(stepped):
            if value.layout is torch.strided and value.stride() != stepped.stride():
                own[key] = in_order_of(stepped, value)

    def _alike(self, stepped: Tensor) -> Iterator[tuple[dict[Any, Any], Any, Tensor]]:
        """Yield what optimizers keep for a tensor in its shape: a dict, a key in it, the value."""
        for optimizer in self._alive():
            own: dict[Any, Any] = optimizer.state.get(stepped, {})
            for key, value in list(own.items()):
                if isinstance(value, Tensor) and value.shape == stepped.shape:
                    yield own, key, value

    def _alive(self) -> Iterator[Optimizer]:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer


def _move(entries: MutableMapping[Any, Any], old: Any, new: Any) -> None:
    """Enter under another key, in two steps: an interrupt between them loses nothing."""
    entries[new] = entries[old]
    del entries[old]


def _own_notes(optimizer: Optimizer, kind: type) -> list[set[Any] | dict[Any, Any]]:
    """Return the sets and dicts of an optimizer that are of such keys; those of one are alike."""
    notes = [one for one in vars(optimizer).values() if isinstance(one, (set, dict))]
    return [
        one
        for one in notes
        if one is not optimizer.state and isinstance(next(iter(one), None), kind)
    ]


def _note(notes: set[Any] | dict[Any, Any], was: Any, now: Any, is_back: bool) -> None:
    """Let what is noted of a tensor, or of its id, hold for another: for the first one as well.

    Args:
        notes: an optimizer's own.
        was, now: the tensors, or their ids.
        is_back: the second one comes back, and nothing holds for the first one any more.
    """
    if was not in notes:
        return
    if isinstance(notes, dict):
        if is_back:
            _move(notes, was, now)
        else:
            notes[now] = notes[was]
        return
    notes.add(now)
    if is_back:
        notes.remove(was)
