"""Which rows of parallel lists the kernels take, by device, with their tables; launches nothing.

A row is the tensors at one index of the lists: a gradient and where it goes, for example. A mix is
the dtypes of a row's tensors, ``("float16", "float32")``: there is a kernel for each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .cuda_module import DTYPE_NAMES
from .getters import DEVICE, DTYPE, LAYOUT
from .tensor_lists import fills_memory
from .tensor_tables import TensorTable

Mix = tuple[str, ...]
Kind = tuple[torch.device, Mix]
Item = TypeVar("Item")


class Part(NamedTuple):
    """The rows on one device that kernels take.

    All their tensors are dense and of float16, bfloat16 or float32.

    Attributes:
        device: of all tensors.
        rows: their indices in the lists.
        table: of the rows; its launches are by mix.
    """

    device: torch.device
    rows: Sequence[int]
    table: TensorTable


class Split(NamedTuple):
    """The rows that kernels take, a part for each device, and the indices of all others."""

    parts: list[Part]
    others: list[int]


class DenseRows:
    """Splits lists of the same devices and sizes, again and again, into the same parts.

    Dtypes may change in the first list alone, in which gradients are: a script may give a parameter
    another ``grad_dtype``. What the others hold was made for the parameters.

    Args:
        takes: returns whether there is a kernel for a mix; None: there is one for every mix.
    """

    def __init__(self, takes: Callable[[Mix], bool] | None = None) -> None:
        self._takes = takes
        self._contiguous: tuple[Any, Split] = (None, Split([], []))
        self._last: tuple[Any, Split] = (None, Split([], []))

    def split(self, *columns: Sequence[Tensor]) -> Split:
        """Split by layouts, strides and the first list's dtypes: nothing else may have changed.

        Args:
            columns: parallel lists of tensors.
        """
        key: Any = layouts(columns)
        dtypes = list(map(DTYPE, columns[0]))
        if key == CONTIGUOUS:
            if dtypes != self._contiguous[0]:
                self._contiguous = dtypes, self._make(columns)
            return self._contiguous[1]
        if key is None:  # of strided tensors nothing else can change
            key = _kinds(columns, self._takes)
        if (key, dtypes) != self._last[0]:
            self._last = (key, dtypes), self._make(columns)
        return self._last[1]

    def split_anew(self, *columns: Sequence[Tensor]) -> Split:
        """As `split`, of lists of any dtypes, devices and sizes; equal ones share tables."""
        key = _kinds(columns, self._takes), _lengths(columns)
        if key != self._last[0]:
            self._last = key, _make_split(*key)
        return self._last[1]

    def _make(self, columns: tuple[Sequence[Tensor], ...]) -> Split:
        return _make_split(_kinds(columns, self._takes), _lengths(columns))


def split(user: str, *columns: Sequence[Tensor]) -> Split:
    """Split lists that may be others at each call.

    Lists like those of one of the last 64 calls share the tables of these, so that tables need not
    be made and uploaded again.

    Args:
        user: the name of the operation; two operations never share tables.
        columns: parallel lists of tensors, as many at each call of one user.
    """
    return _known_split(user, _kinds(columns, None), _lengths(columns))


def forget_splits() -> None:
    """Give up the tables that `split` shares."""
    _known_split.cache_clear()


def chosen(items: Sequence[Item], rows: Sequence[int]) -> list[Item]:
    """Return the items at these indices."""
    return list(items) if len(rows) == len(items) else [items[row] for row in rows]


def _lengths(columns: tuple[Sequence[Tensor], ...]) -> tuple[int, ...]:
    return tuple(map(Tensor.numel, columns[0]))


def _kinds(
    columns: tuple[Sequence[Tensor], ...], takes: Callable[[Mix], bool] | None
) -> tuple[Kind | None, ...]:
    kinds: Iterable[Kind | None]
    if _are_plain(columns):
        dtypes = zip(*(map(DTYPE, column) for column in columns), strict=True)
        kinds = map(_plain_kind, repeat(columns[0][0].device), dtypes)
    else:
        kinds = map(_kind, zip(*columns, strict=True))
    if takes is None:
        return tuple(kinds)
    return tuple(kind if kind is None or takes(kind[1]) else None for kind in kinds)


def _are_plain(columns: tuple[Sequence[Tensor], ...]) -> bool:
    """Return whether nothing but dtypes tells rows apart, as is most often so."""
    tensors = [*chain(*columns)]
    if not {*map(type, tensors)} <= {Tensor, Parameter} or len({*map(DEVICE, tensors)}) != 1:
        return False
    return layouts(columns) == CONTIGUOUS


@functools.lru_cache(maxsize=256)
def _plain_kind(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Kind | None:
    known = all(dtype in DTYPE_NAMES for dtype in dtypes)
    return (device, tuple(DTYPE_NAMES[dtype] for dtype in dtypes)) if known else None


def _kind(row: Sequence[Tensor]) -> Kind | None:
    """Return device and dtypes, or None where no kernel takes the row."""
    first = row[0]
    known = all(one.dtype in DTYPE_NAMES and one.device == first.device for one in row)
    # What wraps other tensors, as DTensor does, has no memory of its own.
    wraps = any(map(is_traceable_wrapper_subclass, row))
    if not known or wraps or not _same_dense_layout(row):
        return None
    return first.device, tuple(DTYPE_NAMES[one.dtype] for one in row)


def _same_dense_layout(row: Sequence[Tensor]) -> bool:
    """Return whether the elements fill the memory, in the same order in each tensor."""
    if not _all_strided(row):
        return False
    if _all_contiguous(row):
        return True
    strides = [_strides(one) for one in row]
    return all(one == strides[0] for one in strides) and fills_memory(row[0])


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Return stride and size of each dimension that has more than one index."""
    return [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


#: What `layouts` returns where each tensor lies in memory in the order of its indices.
CONTIGUOUS: list[Any] = []


def layouts(columns: Sequence[Sequence[Tensor | None]]) -> list[Any] | None:
    """Return what is equal for two lists of the same sizes in the same memory order.

    Args:
        columns: tensors, or None for no tensor.

    Returns:
        `CONTIGUOUS`, or the strides; None where a tensor is not strided.
    """
    if all(map(_all_contiguous, columns)):
        return CONTIGUOUS
    tensors = [[one for one in column if one is not None] for column in columns]
    if not all(map(_all_strided, tensors)):
        return None
    return [list(map(Tensor.stride, column)) for column in tensors]


def _all_strided(tensors: Sequence[Tensor]) -> bool:
    return all(map(operator.is_, map(LAYOUT, tensors), repeat(torch.strided)))


def _all_contiguous(tensors: Sequence[Tensor | None]) -> bool:
    try:
        return all(map(_IS_CONTIGUOUS, tensors))
    except RuntimeError:  # torch has no answer for compressed sparse ones
        return False
    except TypeError:
        return _all_contiguous([one for one in tensors if one is not None])


_IS_CONTIGUOUS: Any = Tensor.is_contiguous


def _make_split(kinds: tuple[Kind | None, ...], lengths: tuple[int, ...]) -> Split:
    rows_by_device: dict[torch.device, list[int]] = {}
    for row, kind in enumerate(kinds):
        if kind is not None:
            rows_by_device.setdefault(kind[0], []).append(row)
    parts = []
    for device, rows in rows_by_device.items():
        mixes: list[Any] = [kinds[row] for row in rows]
        names: list[Hashable] = [mix for _, mix in mixes]
        parts.append(Part(device, rows, TensorTable([lengths[r] for r in rows], names, device)))
    return Split(parts, [row for row, kind in enumerate(kinds) if kind is None])


@functools.lru_cache(maxsize=64)
def _known_split(user: str, kinds: tuple[Kind | None, ...], lengths: tuple[int, ...]) -> Split:
    return _make_split(kinds, lengths)
