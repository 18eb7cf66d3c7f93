"""Small tensors that stay on a device until others are needed; knows not what they mean.

They are uploaded only where their numbers have changed. A CUDA graph that is captured gets what its
replays may read, whatever steps outside of it do by then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .cuda_module import stream_on
from .graph_capture import captures, type_of

T = TypeVar("T")

#: So many different contents of a table can be captured at least, after any step.
_SPARE = 4


class Resident(Generic[T]):
    """A small tensor on a device, made again only where its content or the stream changed.

    Another stream gets another tensor, for what one stream uploads may not have arrived when the
    other reads it. A CUDA graph that is captured gets another one, too, which each replay uploads:
    the upload is part of the graph.

    Args:
        device: where it lies.
        make: returns the tensor for a content (or views of it), made on the current stream.
        capture: the same while a CUDA graph is captured.
    """

    def __init__(
        self, device: torch.device, make: Callable[[Any], T], capture: Callable[[Any], T]
    ) -> None:
        self._device = device
        self._make, self._capture = make, capture
        self._content: Any = None
        self._stream = -1
        self._made: T | None = None

    def holding(self, content: Any) -> T:
        """Return the tensor for a content."""
        if captures.are_made(self._device):
            return self._capture(content)
        stream = stream_on(self._device) if type_of(self._device) == "cuda" else 0
        same = content is self._content or content == self._content
        if self._made is None or not same or stream != self._stream:
            self._made = self._make(content)
            self._content, self._stream = content, stream
        return self._made


def scalar(device: torch.device) -> Resident[Tensor]:
    """Return a float32 number on a device, shape (1,); its content is the number."""

    def make(number: float) -> Tensor:
        return torch.full((1,), number, dtype=torch.float32, device=device)

    return Resident(device, make, make)


class FixedTable(Generic[T]):
    """Integers on a device that never change. Replays of a CUDA graph read them where they are.

    They were uploaded for a step before the capture, which the replays come after all the same: it
    wrote to the parameters that they step.

    Args:
        numbers: the integers.
        device: where they lie.
        views: returns the views of them that are used, of int32, shape (numbers,).
    """

    def __init__(
        self, numbers: list[int], device: torch.device, views: Callable[[Tensor], T]
    ) -> None:
        self._numbers, self._device, self._views = numbers, device, views
        self._last: tuple[Tensor, T] | None = None
        self._resident = Resident(device, self._upload, self._keep)

    def tensors(self) -> T:
        """Return the views."""
        return self._resident.holding(self._numbers)

    def _upload(self, numbers: list[int]) -> T:
        host = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        table = _without_waiting(host, self._device)
        self._last = table, self._views(table)
        return self._last[1]

    def _keep(self, numbers: list[int]) -> T:
        """Return what was uploaded last, which is to live as long as the graph."""
        if self._last is None:
            raise _no_step_before(len(numbers))
        captures.keep(self._last[0])
        return self._last[1]


class AddressTable:
    """Columns of integers on a device, of which most are those of the step before.

    Args:
        rows: how many there are.
        device: where the table lies.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._columns: list[Any] = []
        self._host = torch.empty((rows, 0), dtype=torch.int64, device="cpu")
        self._spare: list[Tensor] = []
        # What living graphs upload from, by its content.
        self._captured: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
        self._resident = Resident(device, self._upload, self._capture)

    def holding(self, columns: list[Sequence[int]]) -> Tensor:
        """Return the table of these columns, int64, shape (rows, columns)."""
        if captures.are_rehearsed:
            captures.note_use(self._reserve)
        return self._resident.holding(columns)

    def _on_host(self, columns: list[Sequence[int]]) -> Tensor:
        if len(columns) != len(self._columns):
            self._columns = [None] * len(columns)
            self._host = self._host.new_empty((self._rows, len(columns)))
            self._spare = [one for one in self._spare if one.shape == self._host.shape]
        for place, column in enumerate(columns if self._rows else ()):
            if column != self._columns[place]:
                numbers = torch.frombuffer(array("q", column), dtype=torch.int64)
                self._host[:, place] = numbers
        self._columns = columns
        return self._host

    def _upload(self, columns: list[Sequence[int]]) -> Tensor:
        host = self._on_host(columns)
        self._reserve(_SPARE)
        return _without_waiting(host, self._device)

    def _reserve(self, count: int) -> None:
        """Have memory for so many contents to be captured.

        Older versions of torch cannot allocate pinned memory during a capture.
        """
        is_cuda = type_of(self._device) == "cuda"
        while len(self._spare) < count:
            self._spare.append(torch.empty_like(self._host, pin_memory=is_cuda))

    def _capture(self, columns: list[Sequence[int]]) -> Tensor:
        """Return a table that each replay uploads: what is eager may need other addresses."""
        content = tuple(map(tuple, columns))
        memory = self._captured.get(content)
        if memory is None:
            host = self._on_host(columns)
            if not self._spare:
                raise _no_step_before(self._rows)
            memory = self._captured[content] = self._spare.pop().copy_(host)
        captures.keep(memory)
        return memory.to(self._device, non_blocking=True, copy=True)


def _without_waiting(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, through pinned memory, which nobody writes to."""
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def _no_step_before(rows: int) -> RuntimeError:
    return RuntimeError(
        "a step must run before a CUDA graph captures it, so that its tables have memory to be "
        f"uploaded from; got a capture of {rows} rows without any; run the step outside of "
        "torch.cuda.graph() first, and again before each capture."
    )
