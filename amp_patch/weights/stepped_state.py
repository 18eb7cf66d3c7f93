"""What optimizers keep for each tensor that they step, while masters stand in a parameter's place.

Knows ``optimizer.state``; no groups, and no values of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
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

    def move(self, old: Tensor, new: Tensor) -> None:
        """Enter the state of one tensor for another, if there is any."""
        for state in self._alive():
            if old in state:
                state[new] = state.pop(old)

    def follow_device(self, stepped: Tensor) -> None:
        """Bring what has the shape of a tensor to the device that it was moved to."""
        for state in self._alive():
            own = state.get(stepped, {})
            for key, value in own.items():
                if isinstance(value, Tensor) and value.shape == stepped.shape:
                    own[key] = value.to(stepped.device)

    def _alive(self) -> Iterator[dict[Any, Any]]:
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer.state
