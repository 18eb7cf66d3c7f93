"""Applies a function to every tensor in nested containers; knows nothing of precision."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_LEAVES = (str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: Any,
    other: Callable[[Any], Any] = lambda item: item,
) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it, ``other`` to other leaves.

    Lists, tuples, named tuples, deques, sets, mappings (also subclasses such as ``OrderedDict`` or
    a model's output object), dataclasses, namespaces and ``PackedSequence`` keep their type. The
    caller's containers are never changed: where no tensor changed the same object is returned, else
    a new one.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, PackedSequence):
        data = function(value.data)
        return value if data is value.data else PackedSequence(data, *value[1:])
    if isinstance(value, (list, tuple)):
        return _map_sequence(function, value, other)
    if isinstance(value, (deque, set, frozenset)):
        return _map_collection(function, value, other)
    if isinstance(value, Mapping):
        return _map_mapping(function, value, other)
    names = _fields_of(value)
    return other(value) if names is None else _map_fields(function, value, names, other)


def items_of(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield what a container holds, with the name that leads to each; None where none does.

    Names are keys of a mapping, and fields of a named tuple, a dataclass or a namespace.
    """
    if isinstance(value, Mapping):
        yield from ((key if isinstance(key, str) else None, item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((None, item) for item in value)
    else:
        yield from ((name, getattr(value, name, None)) for name in _fields_of(value) or ())


def _same(new: Any, old: Any) -> bool:
    """True for one and the same object; unknown, so False, while torch.compile traces."""
    return not torch.compiler.is_compiling() and new is old


def _map_sequence(function: Callable[..., Any], value: Any, other: Callable[..., Any]) -> Any:
    items = [map_tensors(function, item, other) for item in value]
    kind = type(value)
    if all(map(_same, items, value)):
        return value
    if isinstance(value, list) and kind is not list:
        new = copy.copy(value)
        new[:] = items
        return new
    if kind in (list, tuple):
        return kind(items)
    return tuple_of(kind, items)


def tuple_of(kind: type[Any], items: Iterable[Any]) -> Any:
    """Return a tuple of any kind: a named one, say, whose constructor may take anything."""
    is_torchs = hasattr(kind, "n_fields")  # torch.return_types
    return kind(items) if is_torchs else tuple.__new__(kind, items)


def _map_collection(function: Callable[..., Any], value: Any, other: Callable[..., Any]) -> Any:
    items = [map_tensors(function, item, other) for item in value]
    if all(map(_same, items, value)):
        return value
    if type(value) is deque:
        return deque(items, maxlen=value.maxlen)
    if type(value) is set or isinstance(value, frozenset):
        return type(value)(items)
    new = copy.copy(value)
    new.clear()
    (new.extend if isinstance(value, deque) else new.update)(items)
    return new


def _map_mapping(
    function: Callable[..., Any], value: Mapping[Any, Any], other: Callable[..., Any]
) -> Any:
    changed = {}
    for key, old in value.items():
        item = map_tensors(function, old, other)
        if not _same(item, old):
            changed[key] = item
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]  # MappingProxyType
    new = _copy_mapping(value)
    for key, item in changed.items():
        new[key] = item
    return new


def _copy_mapping(value: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Copy a mapping so that writing to the copy leaves the original alone."""
    ordered = type(value).__reduce__ is OrderedDict.__reduce__
    new: MutableMapping[Any, Any] = _copy_ordered(value) if ordered else copy.copy(value)
    attributes = getattr(value, "__dict__", {})
    if attributes is value:
        # The idiom ``self.__dict__ = self``, whose copy has a dictionary of its own.
        object.__setattr__(new, "__dict__", new)
    elif attributes:
        # What is no dict keeps its items in an attribute, which copy.copy shares, as it does what a
        # dict has beside them. The fields of a model's output are items and attributes both.
        vars(new).update(
            {
                name: kept.copy()
                for name, kept in attributes.items()
                if isinstance(kept, (dict, list)) and kept is not value.get(name)
            }
        )
    return new


def _copy_ordered(value: Any) -> OrderedDict[Any, Any]:
    """Copy an ``OrderedDict`` as copy.copy does any other dict, whose constructor it never calls.

    A subclass's may have arguments of its own, which ``OrderedDict.__reduce__`` knows nothing of.
    """
    kind: type[OrderedDict[Any, Any]] = type(value)
    new = kind.__new__(kind)
    for key, item in value.items():
        OrderedDict.__setitem__(new, key, item)
    for name, attribute in vars(value).items():  # torch 2.15 cannot compile vars().update()
        vars(new)[name] = attribute
    return new


def _fields_of(value: Any) -> list[str] | None:
    """Return the names of what a dataclass or a namespace holds; None of all else."""
    if isinstance(value, types.SimpleNamespace):
        return list(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        return [field.name for field in dataclasses.fields(value)]
    return None


def _map_fields(
    function: Callable[..., Any], value: Any, names: list[str], other: Callable[..., Any]
) -> Any:
    changed = {}
    for name in names:
        old = getattr(value, name, None)
        new = map_tensors(function, old, other)
        if not _same(new, old):
            changed[name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        # A frozen dataclass refuses setattr; the copy is ours until it is returned.
        object.__setattr__(result, name, item)
    return result
