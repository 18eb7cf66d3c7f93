"""Gradients that are made when somebody asks for them; knows parameters, no scales or steps.

An optimizer that reads half gradients itself needs no fp32 ones in memory. Whoever reads or sets
``master.grad`` gets them: from then on they are ordinary gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from amp_patch.kernels.getters import DEVICE

from .parameter_lists import (
    are_none,
    have_none,
    store_grad,
    store_grads,
    stored_grad,
    stored_grads,
)


class Source(Protocol):
    """Where gradients come from.

    Attributes:
        is_half: True where some are half gradients, which must stay as they are until then.
    """

    is_half: bool

    def make(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the gradients of these rows."""


class Made:
    """Gradients that are there already."""

    is_half = False

    def __init__(self, grads: list[Tensor]) -> None:
        self._grads = grads

    def make(self, rows: Sequence[int]) -> list[Tensor]:
        """See `Source`."""
        return [self._grads[row] for row in rows]


class LazyGradients:
    """The gradients that some parameters have, made all at once when one of them is asked for.

    Attributes:
        params: whose gradients are waiting; empty where none are.
        source: makes them, a row for each parameter; None where none are waiting.
        stored: references to those that were made, until somebody forgets them.
    """

    def __init__(self) -> None:
        self.params: Sequence[Tensor] = ()
        self.source: Source | None = None
        self._rows: Sequence[int] = ()
        self.stored: Sequence[weakref.ref[Tensor]] = ()

    @property
    def are_waiting(self) -> bool:
        """True from `hold` until the gradients were made or dropped."""
        return self.source is not None

    def parameter(self, value: Tensor, requires_grad: bool) -> LazyGradParameter:
        """Return a parameter whose gradient may wait here."""
        param = LazyGradParameter(value, requires_grad)
        param.wait_for(self)
        return param

    def hold(self, params: Sequence[Tensor], source: Source) -> None:
        """Let parameters, which have none stored, have gradients."""
        self.params, self.source = params, source
        self._rows = range(len(params))

    def materialize(self) -> None:
        """Make and store the gradients, where they are waiting."""
        params, source = self.params, self.source
        if source is not None:
            grads = _beside(params, source.make(self._rows))
            self.drop()
            # A backward that reached the parameter itself has stored one.
            earlier = stored_grads(params)
            if not are_none(earlier):
                pairs = zip(earlier, grads, strict=True)
                grads = [grad if one is None else one + grad for one, grad in pairs]
            store_grads(params, grads)
            alive = [one for one in self.stored if one() is not None]
            self.stored = alive + list(map(weakref.ref, grads))

    def materialize_or_drop(self) -> RuntimeError | None:
        """Make and store the gradients; drop them where they cannot be made, and return why."""
        try:
            self.materialize()
        except RuntimeError as error:
            self.drop()
            return error
        return None

    def discard(self, params: Iterable[Tensor]) -> None:
        """These parameters are to have no gradient; what the others have is stored."""
        unwanted = set(map(id, params))
        rows = [
            row for row, one in zip(self._rows, self.params, strict=True) if id(one) not in unwanted
        ]
        self.params = [one for one in self.params if id(one) not in unwanted]
        self._rows = rows
        if rows:
            self.materialize()
        else:
            self.drop()

    def are_alone(self) -> bool:
        """Return whether no gradient is stored beside those that are waiting."""
        return have_none(self.params)

    def drop(self) -> None:
        """Nobody will ask for the gradients any more."""
        self.params, self.source, self._rows = (), None, ()


def _beside(params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return gradients on the devices of their masters, which follow a moved model in a step."""
    if list(map(DEVICE, params)) == list(map(DEVICE, grads)):
        return grads
    return [grad.to(param.device) for param, grad in zip(params, grads, strict=True)]


class LazyGradParameter(nn.Parameter):
    """A parameter whose gradient may be waiting in a `LazyGradients`, which is held weakly.

    A copy, pickled or not, is without.
    """

    _source: weakref.ref[LazyGradients] | None = None

    def wait_for(self, source: LazyGradients) -> None:
        """Let ``source`` make the gradient when it is read or set."""
        self._source = weakref.ref(source)

    def _read_grad(self) -> Tensor | None:
        self._materialize()
        return stored_grad(self)

    def _set_grad(self, grad: Tensor | None) -> None:
        self._materialize()
        store_grad(self, grad)

    def _delete_grad(self) -> None:
        self._set_grad(None)

    grad = property(_read_grad, _set_grad, _delete_grad, "The gradient, or None.")

    def _materialize(self) -> None:
        source = None if self._source is None else self._source()
        if source is not None and source.are_waiting:
            source.materialize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update({key: v for key, v in vars(self).items() if key != "_source"})
        return plain.__reduce_ex__(protocol)
