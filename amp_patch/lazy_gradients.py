"""Gradients that are made when somebody asks for them; knows parameters, no scales or steps.

An optimizer that reads half gradients itself needs no fp32 ones in memory. Whoever reads or sets
``master.grad`` gets them: from then on they are ordinary gradients.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any

from torch import Tensor, nn

_GRAD: Any = Tensor.grad
#: Read, and set, the gradient that is there, without asking for one.
stored_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
store_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


class LazyGradients:
    """The gradients that some parameters have, made all at once when one of them is asked for."""

    def __init__(self) -> None:
        self._params: Sequence[Tensor] = ()
        self._make: Callable[[], Sequence[Tensor]] | None = None

    @property
    def are_waiting(self) -> bool:
        """True from `hold` until the gradients were made or dropped."""
        return self._make is not None

    def parameter(self, value: Tensor, requires_grad: bool) -> LazyGradParameter:
        """Return a parameter whose gradient may wait here."""
        param = LazyGradParameter(value, requires_grad)
        param.wait_for(self)
        return param

    def hold(self, params: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> None:
        """Let parameters have gradients.

        Args:
            params: which have none stored.
            make: returns a gradient for each.
        """
        self._params, self._make = params, make

    def materialize(self) -> None:
        """Make and store the gradients, where they are waiting."""
        params, make = self._params, self._make
        if make is not None:
            grads = make()
            self.drop()
            # There is one already of a backward that reached the parameter itself.
            earlier = list(map(stored_grad, params))
            if not _are_none(earlier):
                pairs = zip(earlier, grads, strict=True)
                grads = [grad if one is None else one + grad for one, grad in pairs]
            deque(map(store_grad, params, grads), maxlen=0)

    def take(self, groups: Sequence[list[Tensor]]) -> list[list[Tensor | None]]:
        """Return the gradients of groups of parameters, which are not stored if none need be."""
        grads = self._unstored([param for group in groups for param in group])
        if grads is None:
            self.materialize()
            return [list(map(stored_grad, group)) for group in groups]
        ends = list(accumulate(map(len, groups), initial=0))
        return [grads[begin:end] for begin, end in pairwise(ends)]

    def _unstored(self, params: list[Tensor]) -> list[Tensor | None] | None:
        """Return the gradients that are waiting, if these very parameters have them and no more."""
        make, own = self._make, self._params
        if make is None or len(own) != len(params) or not all(map(operator.is_, own, params)):
            return None
        return list(make()) if _are_none(list(map(stored_grad, params))) else None

    def drop(self) -> None:
        """Nobody will ask for the gradients any more."""
        self._params, self._make = (), None


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


def clear_grads(params: Iterable[Tensor]) -> None:
    """Drop the gradients that are stored; those that wait stay."""
    deque(map(store_grad, params, repeat(None)), maxlen=0)


def _are_none(grads: list[Tensor | None]) -> bool:
    return all(map(operator.is_, grads, repeat(None)))
