"""What a model writes into what it was passed, where it got a cast of that: the caller finds it.

As in plain PyTorch a cache that the model fills in place is filled, and a batch has what the model
adds to it. Tensors, lists and dicts, nested; knows nothing of levels.
"""

from __future__ import annotations

import contextlib
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DICTS = (dict, UserDict)


#: What a caller passed, what the model got for it, and how that was then: the version of a tensor,
#: what was in a list or a dict, None of all else.
_Passed = tuple[Any, Any, Any]


class WrittenInputs(threading.local):
    """What the models were called with that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, list[_Passed]]] = []

    def note(self, model: int, given: Sequence[Any], cast: Sequence[Any], is_first: bool) -> None:
        """Note what a model is called with.

        Args:
            model: its id.
            given: what its caller passed.
            cast: the same, as the model gets it.
            is_first: whether no other model runs around it.
        """
        if is_first:
            self._calls = []  # of those that an interrupt has left
        passed: list[_Passed] = []
        for before, now in zip(given, cast, strict=True):
            if now is not before and type(now) is Tensor:  # as nearly always
                passed.append((before, now, now._version))
            elif now is not before:
                passed.extend(_within(before, now))
        self._calls.append((model, passed))

    def give_back(self, model: int, convert: Callable[[Any], Any]) -> None:
        """Write to what the caller passed what the model has written: its call ends.

        Args:
            model: its id.
            convert: is called with what the model has put into a list or a dict.
        """
        calls = self._calls
        if not calls or calls[-1][0] != model:
            if all(called != model for called, _ in calls):  # something raised before it was noted
                return
            while calls[-1][0] != model:  # an interrupt has left these
                calls.pop()
        _, passed = calls.pop()
        for given, cast, before in passed:
            if type(cast) is Tensor:
                if cast._version != before:
                    _write(given, cast)
            elif before is not None and _differs(_items(cast), before):
                given_of = {id(got): one for one, got, _ in passed}
                _put(given, _items(cast), before, given_of, convert)


def _within(given: Any, cast: Any) -> Iterator[_Passed]:
    """Yield what was cast of what a caller passed, and what is in it."""
    if cast is given:
        return
    if isinstance(cast, Tensor):
        yield given, cast, cast._version if type(cast) is Tensor else None
    elif isinstance(cast, (*_DICTS, list, tuple)):
        cast_items, given_items = _items(cast), _items(given)
        yield given, cast, None if isinstance(cast, tuple) else cast_items
        for key, item in cast_items.items():
            yield from _within(given_items[key], item)
    else:
        yield given, cast, None


def _items(container: Any) -> Mapping[Any, Any]:
    return dict(container if isinstance(container, _DICTS) else enumerate(container))


def _differs(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return now.keys() != before.keys() or any(now[key] is not item for key, item in before.items())


def _put(
    given: Any,
    now: Mapping[Any, Any],
    before: Mapping[Any, Any],
    given_of: Mapping[int, Any],
    convert: Callable[[Any], Any],
) -> None:
    """Have in a list or a dict what is in its cast now.

    Args:
        given: the list or dict.
        now, before: what is in the cast, and what was.
        given_of: what was passed, by the id of its cast.
        convert: see `WrittenInputs.give_back`.
    """
    known: dict[int, Any] = {id(item): item for item in before.values()}
    known.update(given_of)
    items = {key: known[id(one)] if id(one) in known else convert(one) for key, one in now.items()}
    if isinstance(given, list):
        given[:] = items.values()
        return
    for key in before.keys() - items.keys():
        del given[key]
    for key, item in items.items():  # the outputs of transformers refuse to be updated
        if now[key] is not before.get(key):
            given[key] = item


def _write(given: Tensor, cast: Tensor) -> None:
    """Write the elements of a cast that are no longer the rounded ones; the others stay exact."""
    if given.is_nested or given.layout is not torch.strided or given.shape != cast.shape:
        return
    if hasattr(given.grad_fn, "_saved_result"):  # as a sigmoid's, which its backward reads
        return
    wide, known = cast.to(given.dtype), given.detach()
    exact = torch.where(known.to(cast.dtype) == cast.detach(), known, wide.detach())
    if cast.requires_grad:  # also for what was multiplied by 1
        exact = wide + (exact - wide.detach()).nan_to_num(0, 0, 0)
    # Torch lets nobody write to a leaf that requires gradients, to an expanded tensor, or to one of
    # several views that one function has made.
    with contextlib.suppress(RuntimeError):
        given.copy_(exact)


#: Of the models that run now.
written_inputs = WrittenInputs()
