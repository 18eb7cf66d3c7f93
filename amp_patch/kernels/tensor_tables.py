"""The tables by which one launch works on many tensors, kept on the device; launches nothing.

The table of tensors has a row for each parameter, say, with the addresses of its tensors and their
number of elements. Tensors are cut into chunks of `CHUNK` elements, and the table of chunks tells
each block of the kernel its row and which chunk of that it works on. A third table tells each row
its chunks. The layouts are those of tensor_table.cuh and summarize.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph_capture import captures

#: Elements of a chunk, as in tensor_table.cuh.
CHUNK = 16384
#: So many different contents of a table can be captured before it is uploaded outside of a graph.
_SPARE = 4


class Resident:
    """A small tensor on a device, made again only where its content or the stream changed.

    Another stream gets another tensor, for what one stream uploads may not have arrived when the
    other reads it. A CUDA graph that is captured gets another one, too, which each replay uploads:
    the upload is part of the graph.

    Args:
        device: where it lies.
        make: returns the tensor for a content, made on the current stream.
        capture: the same while a CUDA graph is captured.
    """

    def __init__(
        self, device: torch.device, make: Callable[[Any], Tensor], capture: Callable[[Any], Tensor]
    ) -> None:
        self._device = device
        self._make, self._capture = make, capture
        self._content: Any = None
        self._stream = -1
        self._made = torch.empty(0, device="cpu")

    def holding(self, content: Any) -> Tensor:
        """Return the tensor for a content."""
        stream = 0
        if self._device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return self._capture(content)
            stream = torch.cuda.current_stream(self._device).cuda_stream
        same = content is self._content or content == self._content
        if not same or stream != self._stream:
            self._made = self._make(content)
            self._content, self._stream = content, stream
        return self._made


def scalar(device: torch.device) -> Resident:
    """Return a float32 number on a device, shape (1,); its content is the number."""

    def make(number: float) -> Tensor:
        return torch.full((1,), number, dtype=torch.float32, device=device)

    return Resident(device, make, make)


class _Upload:
    """Copies lists of integers to a device through pinned memory, without waiting for it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._spare: list[Tensor] = []
        self._captured: tuple[list[int], Tensor] | None = None

    def resident(self) -> Resident:
        return Resident(self._device, self._make, self._capture)

    def _make(self, numbers: list[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=self._dtype, device="cpu")
        if self._device.type != "cuda":
            return host
        while len(self._spare) < _SPARE:
            self._spare.append(torch.empty_like(host, pin_memory=True))
        return host.pin_memory().to(self._device, non_blocking=True)

    def _capture(self, numbers: list[int]) -> Tensor:
        if self._captured is None or numbers != self._captured[0]:
            self._captured = numbers, self._take_spare(numbers)
        host = self._captured[1]
        captures.keep(host)
        return host.to(self._device, non_blocking=True)

    def _take_spare(self, numbers: list[int]) -> Tensor:
        # Older versions of torch cannot allocate pinned memory during a capture.
        if not self._spare:
            raise RuntimeError(
                "a step must run before a CUDA graph captures it, so that its tables have memory "
                f"to be uploaded from; got a capture of {len(numbers)} numbers without any; run "
                "the step outside of torch.cuda.graph() first, and again before each capture."
            )
        return self._spare.pop().copy_(torch.tensor(numbers, dtype=self._dtype, device="cpu"))


class Group(NamedTuple):
    """What one launch does: all rows of one mix, whose chunks are those from begin to end."""

    mix: Any
    begin: int
    end: int


class TensorTable:
    """The tables for tensors of fixed sizes on one device.

    Args:
        lengths: the number of elements of each row's tensors.
        mixes: of each row, what its kernel depends on, for example the dtypes of its tensors; rows
            of one mix share a launch.
        device: where the tables lie.

    Attributes:
        groups: the launches, with the chunks of each; those without any chunk are left out.
    """

    def __init__(
        self, lengths: Sequence[int], mixes: Sequence[Hashable], device: torch.device
    ) -> None:
        rows_by_mix: dict[Hashable, list[int]] = {}
        for row, mix in enumerate(mixes):
            rows_by_mix.setdefault(mix, []).append(row)
        self._lengths = list(lengths)
        self._chunks: list[int] = []
        self._ranges = [0] * (2 * len(lengths) + 1)  # a ticket is behind them, which stays 0
        self.groups: list[Group] = []
        for mix, rows in rows_by_mix.items():
            begin = len(self._chunks) // 2
            for row in rows:
                self._add_chunks(row)
            if self.chunk_count > begin:
                self.groups.append(Group(mix, begin, self.chunk_count))
        self._row_table = _Upload(torch.int64, device).resident()
        self._chunk_table = _Upload(torch.int32, device).resident()
        self._range_table = _Upload(torch.int32, device).resident()

    def _add_chunks(self, row: int) -> None:
        begin = self.chunk_count
        count = -(-self._lengths[row] // CHUNK)
        self._chunks += chain.from_iterable((row, index) for index in range(count))
        self._ranges[2 * row : 2 * row + 2] = begin, begin + count

    @property
    def chunk_count(self) -> int:
        """The number of chunks of all rows."""
        return len(self._chunks) // 2

    def rows(self, *columns: Sequence[Tensor | int | None]) -> Tensor:
        """Return the table of tensors, uploaded only where an address is another one.

        Args:
            columns: per row a dense tensor, None for the null address, or an integer that stands
                as it is.

        Returns:
            int64, shape (rows, columns + 1): the columns' entries, then the number of elements.
        """
        entries = [map(_entry, column) for column in columns]
        numbers = list(chain.from_iterable(zip(*entries, self._lengths, strict=True)))
        return self._row_table.holding(numbers).view(len(self._lengths), len(columns) + 1)

    def chunks(self) -> Tensor:
        """Return the table of chunks, int32, shape (chunks, 2), the groups one after another."""
        return self._chunk_table.holding(self._chunks).view(-1, 2)

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Return begin and end of each row's chunks, int32, shape (rows, 2), and a ticket of 0."""
        table = self._range_table.holding(self._ranges)
        return table[:-1].view(-1, 2), table[-1:]


def _entry(value: Tensor | int | None) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else int(value)
