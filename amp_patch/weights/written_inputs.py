"""What a model writes into what it was passed, where it got a cast of that: the caller finds it.

As in plain PyTorch a cache that the model fills in place is filled, and a batch has what the model
adds to it. The model itself finds what it wrote wherever it was passed the same. Tensors, lists and
dicts, nested; knows nothing of levels.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.casting.nested import tuple_of

_DICTS = (dict, UserDict)


#: What a caller passed, what the model got for it, and how that was then: the version of a tensor,
#: what was in a list or a dict, None of all else.
_Passed = tuple[Any, Any, Any]
_GIVEN = operator.itemgetter(0)


class WrittenInputs(threading.local):
    """What the models were called with that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, list[_Passed]]] = []

    def note(self, model: int, given: Sequence[Any], cast: Sequence[Any], is_first: bool) -> bool:
        """Note what a model is called with.

        Args:
            model: its id.
            given: what its caller passed.
            cast: the same, as the model gets it.
            is_first: whether no other model runs around it.

        Returns:
            Whether something was passed in several places, of which `unite` makes one cast.
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
        return len(passed) > 1 and len(set(map(id, map(_GIVEN, passed)))) < len(passed)

    def unite(self, given: Any, cast: Any) -> Any:
        """Return what the model gets that was noted last, with one cast of each thing.

        It finds what it writes in every place, and asks as in plain PyTorch (``key is value``).

        Args:
            given: what its caller passed, as one container.
            cast: the same, as it was cast: of its lists and dicts the items are set.
        """
        model, _ = self._calls.pop()
        united = _united(given, cast, {})
        passed = {id(one[1]): one for one in _within(given, united)}
        self._calls.append((model, [*passed.values()]))
        return united

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
        written = [one for one in passed if _is_written(*one)]
        if written:
            _give_back(written, passed, convert)


def _is_written(given: Any, cast: Any, before: Any) -> bool:
    if type(cast) is Tensor:
        return bool(cast._version != before)
    return before is not None and _differs(_items(cast), before)


def _give_back(
    written: Sequence[_Passed], passed: Sequence[_Passed], convert: Callable[[Any], Any]
) -> None:
    tensors = [
        (given, cast, _is_kept(given, cast))
        for given, cast, _ in written
        if type(cast) is Tensor and _may_be_written(given, cast)
    ]
    for one in tensors:  # after all looks, for two may be views of one memory
        _write(*one)
    for given, cast, before in written:
        if type(cast) is not Tensor:
            known = {id(item): item for item in before.values()}
            known.update((id(got), one) for one, got, _ in passed)
            given_back = functools.partial(_converted, known=known, convert=convert)
            _put(given, _items(cast), before, given_back)


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


def _united(given: Any, cast: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """Return the first cast that was found of what a caller passed.

    Args:
        given: what was passed.
        cast: the same, as it was cast in this place.
        known: by its id, what was passed, which lives so long, and its first cast.
    """
    if cast is given:
        return cast
    if id(given) in known:
        return known[id(given)][1]
    known[id(given)] = given, cast
    if not isinstance(cast, (*_DICTS, list, tuple)):
        return cast
    given_items, cast_items = _items(given), _items(cast)
    united = {key: _united(given_items[key], item, known) for key, item in cast_items.items()}
    if isinstance(cast, tuple):
        cast = tuple_of(type(cast), [*united.values()])
        known[id(given)] = given, cast
        return cast
    for key, item in united.items():
        if item is not cast_items[key]:
            cast[key] = item
    return cast


def _items(container: Any) -> Mapping[Any, Any]:
    return dict(container if isinstance(container, _DICTS) else enumerate(container))


def _differs(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return now.keys() != before.keys() or any(now[key] is not item for key, item in before.items())


def _converted(item: Any, known: dict[int, Any], convert: Callable[[Any], Any]) -> Any:
    """Return what a caller gets for something that a model has put into a list or a dict.

    Args:
        item: of the model, which may keep it: a list or dict is left alone.
        known: what the caller knows it as, by the id of what the model has.
        convert: see `WrittenInputs.give_back`.
    """
    if id(item) in known:
        return known[id(item)]
    if type(item) not in (dict, list):
        return convert(item)
    new: Any = type(item)()
    known[id(item)] = new  # it may hold itself
    items = {key: _converted(inner, known, convert) for key, inner in _items(item).items()}
    if not _differs(items, _items(item)):
        known[id(item)] = item
        return item
    (new.extend(items.values()) if isinstance(new, list) else new.update(items))
    return new


def _put(
    given: Any,
    now: Mapping[Any, Any],
    before: Mapping[Any, Any],
    convert: Callable[[Any], Any],
) -> None:
    """Have in a list or a dict what is in its cast now.

    Args:
        given: the list or dict.
        now, before: what is in the cast, and what was.
        convert: returns what its caller gets for an item.
    """
    items = {key: convert(item) for key, item in now.items()}
    if isinstance(given, list):
        given[:] = items.values()
        return
    for key in before.keys() - items.keys():
        del given[key]
    for key, item in items.items():  # the outputs of transformers refuse to be updated
        if now[key] is not before.get(key):
            given[key] = item


def _may_be_written(given: Tensor, cast: Tensor) -> bool:
    if given.is_nested or given.layout is not torch.strided or given.shape != cast.shape:
        return False
    return not hasattr(given.grad_fn, "_saved_result")  # as a sigmoid's, which its backward reads


def _is_kept(given: Tensor, cast: Tensor) -> Tensor:
    """Return where a cast holds what it was given, rounded: there the caller's stays exact."""
    return given.detach().to(cast.dtype) == cast.detach()


def _write(given: Tensor, cast: Tensor, is_kept: Tensor) -> None:
    wide = cast.to(given.dtype)
    exact = torch.where(is_kept, given.detach(), wide.detach())
    if cast.requires_grad:  # also for what was multiplied by 1
        exact = wide + (exact - wide.detach()).nan_to_num(0, 0, 0)
    # Torch lets nobody write to a leaf that requires gradients, to an expanded tensor, or to one of
    # several views that one function has made.
    with contextlib.suppress(RuntimeError):
        given.copy_(exact)


#: Of the models that run now.
written_inputs = WrittenInputs()
