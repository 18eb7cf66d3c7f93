"""What a value holds at one moment, saved and put back: tensors, containers, generators, objects.

Knows values, nothing of models. What an object keeps elsewhere than in its attributes (in C, in an
open file) is not seen.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch import patching
from amp_patch.common.imported_modules import is_left_alone

#: So many values are looked at below one: a module may hold its trainer, or a dataset.
MOST_VALUES = 2000
#: What nobody writes to; and modules and parameters, which a model is looked through for.
_NOT_HELD = (
    *(type(None), str, bytes, int, float, complex, type, torch.dtype, torch.device),
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(nn.Module, nn.Parameter),
)


class HeldValue:
    """A value, and what it and the values in it hold when this is made.

    Attributes:
        value: itself.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._held: list[tuple[_Kind, Any, Any]] = []
        seen: set[int] = set()
        waiting = deque([value])
        while waiting and len(seen) < MOST_VALUES:
            one = waiting.popleft()
            kind = _kind_of(one)
            if kind is None or id(one) in seen:
                continue
            seen.add(id(one))
            try:
                contents = kind.read(one)
                kind.is_same(one, contents)
            except Exception:  # what cannot be copied or compared is left alone: a training goes on
                continue
            self._held.append((kind, one, contents))
            waiting.extend(kind.parts(contents))

    def is_unchanged(self) -> bool:
        """Return whether all of them hold what they held."""
        return all(kind.is_same(one, contents) for kind, one, contents in self._held)

    @torch.no_grad()
    def put_back(self) -> None:
        """Let each hold again what it held; what did not change is not written to."""
        for kind, one, contents in self._held:
            if not kind.is_same(one, contents):
                kind.write(one, contents)


class _Kind(NamedTuple):
    """How the contents of a value are read and written.

    Attributes:
        read: returns contents that later writes to the value do not change.
        is_same: whether a value holds such contents.
        write: gives a value these contents.
        parts: the values in such contents.
    """

    read: Callable[[Any], Any]
    is_same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], object]
    parts: Callable[[Any], Iterable[Any]] = lambda contents: ()


def _kind_of(value: Any) -> _Kind | None:
    """Return how to read a value; None for one that holds nothing, or nothing that can be read."""
    if isinstance(value, _NOT_HELD):
        return None
    if isinstance(value, Tensor):
        return _TENSOR if _has_memory(value) and not value.is_inference() else None
    for class_, kind in (*_KINDS.items(), *_numpy_kinds()):
        if isinstance(value, class_):
            return kind
    # what torch keeps in objects, of buckets and shards, say, is its own matter
    is_own = not is_left_alone(type(value).__module__)
    has_attributes = hasattr(value, "__dict__") or bool(_slots_of(type(value)))
    return _OBJECT if is_own and has_attributes else None


def _has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor's numbers can be read: FSDP takes the memory of its own away."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.is_floating_point() and tensor.element_size() == 1:  # float8 is not compared
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    needed = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return needed <= tensor.untyped_storage().nbytes()


def _numpy_kinds() -> list[tuple[type, _Kind]]:
    """Return those of NumPy, which torch need not have."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    return [
        (numpy.ndarray, _ARRAY),
        (numpy.random.Generator, _of_state(_numpy_state, _set_numpy_state)),
        (numpy.random.RandomState, _of_state(lambda one: one.get_state(), _set_state)),
    ]


def _of_state(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> _Kind:
    """Return the kind of a generator of random numbers, whose state may hold arrays."""
    return _Kind(
        lambda one: pickle.dumps(read(one)),
        lambda one, contents: pickle.dumps(read(one)) == contents,
        lambda one, contents: write(one, pickle.loads(contents)),
    )


def _numpy_state(generator: Any) -> Any:
    return generator.bit_generator.state


def _set_numpy_state(generator: Any, state: Any) -> None:
    patching.put(generator.bit_generator, "state", state)


def _set_state(generator: Any, state: Any) -> None:
    generator.set_state(state)


def _read_tensor(value: Tensor) -> tuple[Tensor, Tensor]:
    data = value.detach()
    return data, data.clone()


def _is_same_tensor(value: Tensor, contents: tuple[Tensor, Tensor]) -> bool:
    data, values = contents
    return value.data_ptr() == data.data_ptr() and torch.equal(value, values)


def _write_tensor(value: Tensor, contents: tuple[Tensor, Tensor]) -> None:
    data, values = contents
    if value.data_ptr() != data.data_ptr():
        value.data = data
    value.data.copy_(values)  # a graph that has saved it goes by its version


def _write_array(value: Any, contents: Any) -> None:
    value[...] = contents


def _write_list(value: list[Any], contents: list[Any]) -> None:
    value[:] = contents


def _write_queue(value: deque[Any], contents: list[Any]) -> None:
    value.clear()
    value.extend(contents)


def _write_others(value: Any, contents: Any) -> None:
    value.clear()
    value.update(contents)


def _are_same(value: Iterable[Any], contents: Iterable[Any]) -> bool:
    """Return whether both hold the same objects, whose classes need not say when they are equal."""
    return list(map(id, value)) == list(map(id, contents))


def _are_same_pairs(value: Mapping[Any, Any], contents: Mapping[Any, Any]) -> bool:
    return _are_same(value, contents) and _are_same(value.values(), contents.values())


def _slots_of(kind: type) -> list[str]:
    """Return the names of the attributes that classes of Python's keep in ``__slots__``."""
    return [
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
    ]


def _read_object(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the attributes of an object, and those that it keeps in slots."""
    slots = {}
    for name in _slots_of(type(value)):
        with contextlib.suppress(AttributeError):  # one that was never set
            slots[name] = object.__getattribute__(value, name)
    return dict(getattr(value, "__dict__", {})), slots


def _is_same_object(value: Any, contents: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    return all(map(_are_same_pairs, _read_object(value), contents))


def _write_object(value: Any, contents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, slots = contents
    if hasattr(value, "__dict__"):
        _write_others(vars(value), attributes)
    for name in _read_object(value)[1].keys() - slots.keys():
        patching.take_away(value, name)
    for name, item in slots.items():
        patching.put(value, name, item)


_TENSOR = _Kind(_read_tensor, _is_same_tensor, _write_tensor)
_ARRAY = _Kind(lambda one: one.copy(), lambda one, old: bool((one == old).all()), _write_array)
_MAPPING = _Kind(dict, _are_same_pairs, _write_others, lambda contents: contents.values())
_OBJECT = _Kind(
    _read_object,
    _is_same_object,
    _write_object,
    lambda contents: [*contents[0].values(), *contents[1].values()],
)
_KINDS: dict[type, _Kind] = {
    tuple: _Kind(tuple, _are_same, lambda one, contents: None, tuple),
    list: _Kind(list, _are_same, _write_list, list),
    deque: _Kind(list, _are_same, _write_queue, list),
    set: _Kind(list, _are_same, _write_others, list),
    dict: _MAPPING,
    bytearray: _Kind(bytes, operator.eq, _write_list),
    random.Random: _of_state(lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    torch.Generator: _of_state(lambda one: one.get_state(), _set_state),
}
