"""Gradients that are made when somebody asks for them; knows parameters, no scales or steps.

An optimizer that reads half gradients itself needs no fp32 ones in memory. Whoever reads or sets
``master.grad`` gets them: from then on they are ordinary gradients.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")

_GRAD: Any = Tensor.grad
#: Read, and set, the gradient that is there, without asking for one.
stored_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
_STORED: Callable[[Tensor], Tensor | None] = operator.attrgetter("_grad")  # the same, of many
store_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__

_NO_FUNCTION = torch._C._disabled_torch_function_impl
_switched_off = torch._C.DisableTorchFunctionSubclass


def as_plain_tensors(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a block in which torch asks none of these for its ``__torch_function__``.

    At each call torch looks for it at tensors of a class of their own, as masters are: that takes
    the host longer than the call. A user's class that has one is asked, as always.
    """
    classes: set[Any] = set(map(type, tensors)) - {Tensor}
    for own in classes:
        if own.__torch_function__ is not _NO_FUNCTION:
            return nullcontext()
    return _switched_off()


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
    """

    def __init__(self) -> None:
        self.params: Sequence[Tensor] = ()
        self.source: Source | None = None
        self._rows: Sequence[int] = ()

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
            grads = source.make(self._rows)
            self.drop()
            # There is one already of a backward that reached the parameter itself.
            earlier = stored_grads(params)
            if not are_none(earlier):
                pairs = zip(earlier, grads, strict=True)
                grads = [grad if one is None else one + grad for one, grad in pairs]
            store_grads(params, grads)

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


class Tensors(list[Tensor]):
    """What `listed` returns; unlike a plain list it can be referenced weakly."""


class PlainTensors(Tensors):
    """Tensors of torch's own classes: there is no other class to be kept out.

    Who asks ten of them for something takes the host a fourth less time without a block.

    Attributes:
        singles: the rows of those that have no more than one number.
    """

    singles: Sequence[int] = ()


def listed(tensors: Iterable[Tensor]) -> Tensors:
    """Return a new list of tensors, which knows whether all of them are of torch's own classes."""
    own = list(tensors)
    if not _PLAIN.issuperset(map(type, own)):
        return Tensors(own)
    plain = PlainTensors(own)
    plain.singles = [row for row, one in enumerate(own) if one.numel() <= 1]
    return plain


def are_still(known: list[Tensor], tensors: Any) -> bool:
    """Return whether a list holds the very tensors that are known, as it nearly always does.

    Python's own comparison of lists tells most often, in a fiftieth of the time: it asks no object
    whether it equals itself. Two tensors it compares number by number, and raises where these are
    several; where it is one, they may be equal.

    Args:
        known: what `listed` returned.
        tensors: any list.
    """
    if isinstance(known, PlainTensors) and isinstance(tensors, list):
        singles = known.singles
        try:
            if known != tensors:
                return False
        except Exception:
            return False
        for row in singles:  # noqa: SIM110  # no generator: faster
            if tensors[row] is not known[row]:
                return False
        return True
    return len(tensors) == len(known) and all(map(operator.is_, tensors, known))


_PLAIN = frozenset({Tensor, nn.Parameter})


def look_up(what: Callable[[Tensor], Value], params: Iterable[Tensor]) -> list[Value]:
    """Return what torch itself knows of each parameter: its class is not asked."""
    if type(params) is PlainTensors:
        return list(map(what, params))
    with _switched_off():
        return list(map(what, params))


def all_are(what: Callable[[Tensor], bool], params: Iterable[Tensor]) -> bool:
    """Return whether torch itself says so of every parameter."""
    if type(params) is PlainTensors:
        return all(map(what, params))
    with _switched_off():
        return all(map(what, params))


def clear_grads(params: Iterable[Tensor]) -> None:
    """Drop the gradients that are stored; those that wait stay."""
    if type(params) is PlainTensors:
        for param in params:  # half as many instructions as by `map`
            param.grad = None
        return
    store_grads(params, repeat(None))


def stored_grads(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients that are there; None where there is none, or one waits."""
    return look_up(_STORED, params)


def have_none(params: Iterable[Tensor]) -> bool:
    """Return whether no gradient is stored, though some may be waiting."""
    if type(params) is PlainTensors:
        return _have_none(params)
    with _switched_off():
        return _have_none(params)


def _have_none(params: Iterable[Tensor]) -> bool:
    for param in params:  # noqa: SIM110  # no generator: faster
        if param._grad is not None:
            return False
    return True


def store_grads(params: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set the gradients that are there; those that wait stay, and are added to these."""
    if type(params) is PlainTensors:
        for param, grad in zip(params, grads, strict=False):
            param.grad = grad
        return
    with _switched_off():
        deque(map(store_grad, params, grads), maxlen=0)


def are_none(grads: Iterable[Tensor | None]) -> bool:
    """Return whether there is no gradient among these."""
    for grad in grads:  # noqa: SIM110  # a third of what `map` takes
        if grad is not None:
            return False
    return True


def are_complete(grads: Iterable[Tensor | None]) -> bool:
    """Return whether each of these is a gradient."""
    for grad in grads:  # noqa: SIM110  # as above
        if grad is None:
            return False
    return True
