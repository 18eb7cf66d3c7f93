"""The tables by which one launch works on many tensors, kept on the device; launches nothing.

The table of tensors has a row for each parameter, say, with the addresses of its tensors and their
number of elements. Tensors are cut into chunks of `CHUNK` elements, and the table of chunks tells
each block of the kernel its row and which chunk of that it works on. A third table tells each row
its chunks. The layouts are those of tensor_table.cuh and summarize.cu.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph_capture import captures
from .resident import AddressTable, FixedTable

#: Elements of a chunk, as in tensor_table.cuh.
CHUNK = 16384


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
        self._ranges = [0] * (2 * len(lengths) + 1)  # a ticket is after them, which stays 0
        self.groups: list[Group] = []
        for mix, rows in rows_by_mix.items():
            begin = len(self._chunks) // 2
            for row in rows:
                self._add_chunks(row)
            if self.chunk_count > begin:
                self.groups.append(Group(mix, begin, self.chunk_count))
        self._row_table = AddressTable(len(lengths), device)
        self._chunk_table = FixedTable(self._chunks, device, lambda table: table.view(-1, 2))
        self._range_table = FixedTable(
            self._ranges, device, lambda table: (table[:-1].view(-1, 2), table[-1:])
        )

    def _add_chunks(self, row: int) -> None:
        begin = self.chunk_count
        count = -(-self._lengths[row] // CHUNK)
        self._chunks += chain.from_iterable((row, index) for index in range(count))
        self._ranges[2 * row : 2 * row + 2] = begin, begin + count

    @property
    def chunk_count(self) -> int:
        """The number of chunks of all rows."""
        return len(self._chunks) // 2

    def rows(self, *columns: Sequence[Tensor | None]) -> Tensor:
        """Return the table of tensors, uploaded only where an address is another one.

        Args:
            columns: per row a dense tensor, or None for the null address.

        Returns:
            int64, shape (rows, columns + 1): the addresses, then the number of elements.
        """
        return self.rows_of(*map(addresses, columns))

    def rows_of(self, *columns: Sequence[int]) -> Tensor:
        """As `rows`, of columns of integers, which stand as they are."""
        return self._row_table.holding([*columns, self._lengths])

    def chunks(self) -> Tensor:
        """Return the table of chunks, int32, shape (chunks, 2), the groups one after another."""
        return self._chunk_table.tensors()

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Return begin and end of each row's chunks, int32, shape (rows, 2), and a ticket of 0."""
        ranges, ticket = self._range_table.tensors()
        if captures.are_made(ticket.device):
            # Kernels count in it while they run, and others may run beside a replay.
            ticket = torch.zeros_like(ticket)
        return ranges, ticket


def addresses(column: Sequence[Tensor | None]) -> list[int]:
    """Return the address of each dense tensor, and 0 for None."""
    try:
        return list(map(_DATA_PTR, column))
    except TypeError:
        if all(map(operator.is_, column, repeat(None))):
            return [0] * len(column)
        return [0 if one is None else one.data_ptr() for one in column]


_DATA_PTR: Any = Tensor.data_ptr
