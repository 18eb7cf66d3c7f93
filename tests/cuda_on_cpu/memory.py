"""Memory for launches: tensors with NaN around them, and the two tables; knows no kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_on_cpu import CHUNK

_ALL_ONES = 0xFF  # a NaN in each of the dtypes


class Memory:
    """Places tensors as a kernel gets them; what it writes outside of them is found out."""

    def __init__(self) -> None:
        self._placed: list[tuple[Tensor, int, int]] = []

    def place(self, values: Tensor, offset: int = 0) -> Tensor:
        """Copy a dense tensor to an address `offset` elements after one aligned to 64 bytes."""
        # what a whole chunk too much would touch is still a test's own
        size = values.element_size()
        guard = CHUNK * size
        begin = guard + offset * size
        end = begin + values.numel() * size
        memory = torch.full((end + guard,), _ALL_ONES, dtype=torch.uint8)
        assert memory.data_ptr() % 64 == 0
        self._placed.append((memory, begin, end))
        tensor = memory[begin:end].view(values.dtype)
        return tensor.copy_(values.reshape(-1))

    def empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Place a tensor of NaN, for results."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        length = torch.Size(shape).numel()
        return self.place(torch.full((length,), -1, dtype=bits).view(dtype)).view(shape)

    def check(self) -> None:
        """Fail where anything beside a tensor was written."""
        for memory, begin, end in self._placed:
            assert memory[:begin].min() == _ALL_ONES, "written before a tensor"
            assert memory[end:].min() == _ALL_ONES, "written after a tensor"


def row_table(rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """Return the table of tensors: addresses (0 for None), then the first tensor's length."""
    entries = []
    for row in rows:
        assert row[0] is not None
        addresses = [0 if one is None else one.data_ptr() for one in row]
        entries.append([*addresses, row[0].numel()])
    return torch.tensor(entries, dtype=torch.int64)


def chunk_table(lengths: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
    """Return the table of chunks of tensors of these lengths, in `rows` of the table of tensors."""
    rows = range(len(lengths)) if rows is None else rows
    entries = [
        (row, index)
        for row, length in zip(rows, lengths, strict=True)
        for index in range(-(-length // CHUNK))
    ]
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, 2)


def chunk_ranges(lengths: Sequence[int]) -> Tensor:
    """Return begin and end of each tensor's chunks in `chunk_table(lengths)`."""
    counts = torch.tensor([-(-length // CHUNK) for length in lengths], dtype=torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.stack([ends - counts, ends], dim=1)
