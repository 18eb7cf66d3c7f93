"""Gradients that scaled losses write to parameters which no prepared optimizer steps.

Knows parameters, their gradients and what these are multiplied by; no optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch.common.scales import Scale
from amp_patch.gradients.foreign_gradients import Watch
from amp_patch.gradients.true_gradients import TrueGradients
from amp_patch.weights.parameter_lists import stored_grad


class ScaledGradient(NamedTuple):
    """A parameter with its scaled gradient, and what tells whether that is as it was.

    Attributes:
        scale: what the gradient is multiplied by.
    """

    param: TensorWeakRef
    grad: TensorWeakRef
    version: int
    scale: Scale

    @classmethod
    def of(cls, param: Tensor, grad: Tensor, scale: Scale) -> ScaledGradient:
        """Return a parameter with its gradient as it is now."""
        return cls(TensorWeakRef(param), TensorWeakRef(grad), grad._version, scale)

    def left(self) -> Tensor | None:
        """Return the gradient if the parameter has it, and the script has not written to it.

        It may have unscaled it, taken its signs, or zeroed it for a backward of its own.
        """
        param, grad = self.param(), self.grad()
        if param is None or grad is None or self.version != grad._version:
            return None
        return grad if stored_grad(param) is grad else None


class OpenBlock:
    """A block of a scaled loss, and what its backward finds at parameters that nobody unscales.

    Args:
        watch: these parameters, as they are before it.
        scale: of the block.

    Attributes:
        scale: as given.
        thread: that it is of.
        watches: the given one, and others that begin in it.
        true: those of their gradients that are not multiplied by any scale, and stay so.
    """

    def __init__(self, watch: Watch, scale: Scale) -> None:
        self.scale, self.thread = scale, threading.get_ident()
        self.watches = [watch]
        self.true = TrueGradients(scale)
        self._taken: set[int] = set()

    def written(self, plain_backwards: int) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters whose gradients it has multiplied by its scale, with these.

        Not those that an optimizer has got since.

        Args:
            plain_backwards: how many there were; where there was one since, nothing is known:
                another thread trains its own model, or the block does.
        """
        known = (one for one in self.watches if one.params and one.counted == plain_backwards)
        rows = chain.from_iterable(one.written() for one in known)
        return [
            (param, grad)
            for param, grad in rows
            if id(param) not in self._taken and not self.true.has(param)
        ]

    def take(self, params: Iterable[Tensor]) -> None:
        """An optimizer has got these."""
        self._taken.update(map(id, params))
