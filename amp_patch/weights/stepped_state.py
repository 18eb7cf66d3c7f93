"""What optimizers keep for each tensor that they step, while masters stand in a parameter's place.

Knows ``optimizer.state``, and what an optimizer of a user's has noted of parameters when it was
made, as a set of those that no weight decay is for; no groups, and no values of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class SteppedState:
    """The state of optimizers that step the same tensors, as one that wraps another does.

    Args:
        optimizers: held weakly.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._noted: set[int] = set()

    def move(self, old: Tensor, new: Tensor) -> None:
        """Enter the state of one tensor for another, if there is any, and what is noted of it."""
        for optimizer in self._alive():
            if old in optimizer.state:
                _move(optimizer.state, old, new)
            for notes in vars(optimizer).values():
                if isinstance(notes, (set, dict)) and notes is not optimizer.state:
                    _note(notes, old, new, is_back=id(old) in self._noted)
        if id(old) in self._noted:
            self._noted.discard(id(old))
        else:
            self._noted.add(id(new))

    def follow_device(self, stepped: Tensor) -> None:
        """Bring what has the shape of a tensor to the device that it was moved to."""
        for optimizer in self._alive():
            own = optimizer.state.get(stepped, {})
            for key, value in own.items():
                if isinstance(value, Tensor) and value.shape == stepped.shape:
                    own[key] = value.to(stepped.device)

    def _alive(self) -> Iterator[Optimizer]:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer


def _move(entries: MutableMapping[Any, Any], old: Any, new: Any) -> None:
    """Enter under another key, in two steps: an interrupt between them loses nothing."""
    entries[new] = entries[old]
    del entries[old]


def _note(notes: set[Any] | dict[Any, Any], old: Tensor, new: Tensor, is_back: bool) -> None:
    """Let what is noted of a tensor, or of its id, hold for another: for the first one as well.

    Args:
        notes: an optimizer's own; the keys of one are all of one kind.
        old, new: the tensors.
        is_back: the second one comes back, and nothing holds for the first one any more.
    """
    first = next(iter(notes), None)
    was: Any = old if isinstance(first, Tensor) else id(old)
    now: Any = new if isinstance(first, Tensor) else id(new)
    if not isinstance(first, (Tensor, int)) or was not in notes:
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
