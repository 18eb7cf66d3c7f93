"""Launches one kernel for many tensors; knows no kernel by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from . import cuda_module
from .cuda_module import Argument, Kernel
from .dense_rows import Part


def launch(
    part: Part,
    source: str,
    name: str,
    parameters: str,
    rows: Tensor,
    *arguments: Argument,
    per_chunk: Tensor | None = None,
    blocks_per_chunk: int = 1,
) -> None:
    """Launch a kernel for each mix of dtypes in a part.

    For example, ``launch(part, "cast.cu", "cast_{}_to_{}", "PP", rows)`` launches
    ``cast_float32_to_float16`` and ``cast_float32_to_bfloat16`` where the part has rows of both.

    Args:
        part: the rows.
        source: the file in csrc/.
        name: the kernel's, with a {} for each dtype of the mix.
        parameters: the kernel's, a letter each, see `cuda_module.packed`.
        rows: the table of tensors, as `TensorTable.rows` returns it.
        arguments: what the kernel takes after the tables of tensors and of chunks.
        per_chunk: memory with a row for each chunk of the part; each launch gets that of its own
            chunks as its last argument. None: the kernel takes none.
        blocks_per_chunk: how many blocks of the kernel share a chunk.
    """
    chunks = part.table.chunks()
    for mix, begin, end in part.table.groups:
        kernel = Kernel(source, name.format(*mix), parameters)
        own, memory = chunks, per_chunk
        if begin:  # a slice takes the host longer than all else here
            own, memory = chunks[begin:], None if per_chunk is None else per_chunk[begin:]
        operands = (rows, own, *arguments, *(() if memory is None else (memory,)))
        grid = (end - begin) * blocks_per_chunk
        cuda_module.modules.launch(kernel, grid, part.device, *operands)


def note_written(tensors: Sequence[Tensor]) -> None:
    """Count up the versions of tensors that a kernel wrote to: autograd cannot see that it did."""
    if _TAKES_LISTS:
        increment_version(tensors)
    else:
        for tensor in tensors:
            increment_version(tensor)


def _takes_lists() -> bool:
    """Return whether one call counts up a whole list, which older versions of torch do not."""
    try:
        increment_version([])
    except (RuntimeError, TypeError):
        return False
    return True


_TAKES_LISTS = _takes_lists()
