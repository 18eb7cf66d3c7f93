"""Lists of parameters, asked together for what torch knows of each, and for their gradients.

Masters and users' parameters may be of classes of their own, at which torch looks for a
``__torch_function__`` in each call: that takes the host longer than the call. Knows no optimizer.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from amp_patch.kernels.default_device import without_default_device

Value = TypeVar("Value")

_GRAD: Any = Tensor.grad
#: Read, and set, the gradient that is there, without asking for one.
stored_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
#: The same, of many.
STORED_GRAD: Callable[[Tensor], Tensor | None] = operator.attrgetter("_grad")
store_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__

_keeping_version: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # torch's own
_NO_FUNCTION = torch._C._disabled_torch_function_impl
_switched_off = torch._C.DisableTorchFunctionSubclass


def as_plain_tensors(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a block in which torch asks none of these for its ``__torch_function__``.

    At each call torch looks for it at tensors of a class of their own, as masters are: that takes
    the host longer than the call. A user's class that has one is asked, as always.
    """
    return _switched_off() if _are_torchs(set(map(type, tensors))) else nullcontext()


def _are_torchs(classes: set[type[Tensor]]) -> bool:
    """Return whether none of these has a ``__torch_function__`` of its own."""
    for own in classes:
        if own is not Tensor and own.__torch_function__ is not _NO_FUNCTION:
            return False
    return True


class Tensors(list[Tensor]):
    """What `listed` returns; unlike a plain list it can be referenced weakly.

    Attributes:
        singles: the rows of those that have no more than one number; None where one is of a class
            of the user's, which may compare tensors in its own way.
    """

    singles: Sequence[int] | None = None


class PlainTensors(Tensors):
    """Tensors of torch's own classes, which need no `as_plain_tensors`.

    To ask ten of them for something takes the host a fourth less time without that block.
    """


def listed(tensors: Iterable[Tensor]) -> Tensors:
    """Return a new list of tensors, which knows whether all of them are of torch's own classes."""
    own = list(tensors)
    kinds = set(map(type, own))
    found = PlainTensors(own) if _PLAIN.issuperset(kinds) else Tensors(own)
    if _are_torchs(kinds):
        found.singles = [row for row, one in enumerate(own) if one.numel() <= 1]
    return found


def are_still(known: list[Tensor], tensors: Any) -> bool:
    """Return whether a list holds the very tensors that are known, as it nearly always does.

    Python's own comparison of lists tells most often, in a fiftieth of the time: it asks no object
    whether it equals itself. Two tensors it compares number by number, and raises where these are
    several; where it is one, they may be equal.

    Args:
        known: what `listed` returned.
        tensors: any list.
    """
    singles = known.singles if isinstance(known, Tensors) else None
    if singles is not None and isinstance(tensors, list):
        try:
            if known != tensors:
                return False
        except Exception:
            return False
        for row in singles:  # noqa: SIM110  # no generator: faster
            if tensors[row] is not known[row]:
                return False
        return True
    return are_same(tensors, known)


def are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


_PLAIN = frozenset({Tensor, nn.Parameter})


def in_shares(params: Sequence[Tensor], at_most: float) -> Iterator[list[int]]:
    """Yield rows that follow each other, of so many elements together, or one that has more."""
    share: list[int] = []
    elements = 0
    for row, param in enumerate(params):
        size = param.numel()
        if share and elements + size > at_most:
            yield share
            share, elements = [], 0
        share.append(row)
        elements += size
    if share:
        yield share


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


@contextmanager
def keeping_versions(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a block whose writes to these tensors move no version of theirs."""
    with ExitStack() as stack:
        for tensor in tensors:  # torch 2.6 takes one at a time
            stack.enter_context(_keeping_version(tensor))
        yield


@without_default_device
def clear_grads(params: Iterable[Tensor]) -> None:
    """Drop the gradients that are stored; those that wait stay."""
    if type(params) is PlainTensors:
        for param in params:  # half as many instructions as by `map`
            param.grad = None
        return
    store_grads(params, repeat(None))


def stored_grads(params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients that are there; None where there is none, or one waits."""
    return look_up(STORED_GRAD, params)


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
