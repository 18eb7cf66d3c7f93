"""What the operations over lists of tensors share: checked lists, wide copies, flags.

Knows nothing of what is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def columns_of(tensor_lists: Lists, *depths: int) -> list[list[Tensor]]:
    """Return the lists of an operation that takes so many, each of one length.

    Raises:
        RuntimeError: another number of lists, or lists of different lengths.
    """
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(lengths) not in depths or len(set(lengths)) > 1:
        raise RuntimeError(
            f"this operation takes {' or '.join(map(str, depths))} lists of tensors of one length; "
            f"got lists of lengths {lengths}; call multi_tensor_applier(operation, noop_flag, "
            "[list, ...], ...) with a tensor of each list for each tensor of the first."
        )
    return [list(tensors) for tensors in tensor_lists]


def widened(columns: Lists) -> list[list[Tensor]]:
    """Return the tensors as float32 (float64 where one is), each row in one memory layout.

    A tensor that is so already is returned itself, any other as a copy.
    """
    has_double = any(tensor.dtype is torch.float64 for column in columns for tensor in column)
    wide = torch.float64 if has_double else torch.float32
    if all(map(_share_layout, zip(*columns, strict=True))):
        return [[tensor.to(wide) for tensor in column] for column in columns]
    return [[tensor.to(wide).contiguous() for tensor in column] for column in columns]


def _share_layout(row: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in row):
        return True
    last = torch.channels_last
    return all(tensor.is_contiguous(memory_format=last) for tensor in row)


def write_back(columns: Lists, wide: Lists) -> None:
    """Write what `widened` copied to the tensors that it was copied from."""
    for column, copies in zip(columns, wide, strict=True):
        pairs = [(ours, theirs) for ours, theirs in zip(column, copies, strict=True)]
        changed = [pair for pair in pairs if pair[0] is not pair[1]]
        if changed:
            torch._foreach_copy_([ours for ours, _ in changed], [theirs for _, theirs in changed])


def like(tensors: Sequence[Tensor], numbers: Sequence[Tensor]) -> list[Tensor]:
    """Return 0-dim tensors with the device and dtype of the tensors they are used with."""
    device, dtype = tensors[0].device, tensors[0].dtype
    return [number.to(device, dtype) for number in numbers]


def raise_flag(noop_flag: Tensor, has_nonfinite: Tensor) -> None:
    """Set a flag to 1 where a bool of one element is True, without waiting for its device."""
    noop_flag.masked_fill_(has_nonfinite.reshape(()).to(noop_flag.device), 1)


def is_known_set(noop_flag: Tensor) -> bool:
    """Return whether a flag is not 0, where that can be told without waiting for its device."""
    return noop_flag.device.type == "cpu" and int(noop_flag) != 0


@contextlib.contextmanager
def unless_set(noop_flag: Tensor, *columns: Sequence[Tensor]) -> Iterator[None]:
    """Undo what the block writes to tensors, if a flag on their device is not 0."""
    if noop_flag.device.type == "cpu":
        yield
        return
    before = [[tensor.clone() for tensor in column] for column in columns]
    yield
    for column, old in zip(columns, before, strict=True):
        for tensor, was in zip(column, old, strict=True):
            is_set = noop_flag.reshape(()).to(tensor.device) != 0
            tensor.copy_(torch.where(is_set, was, tensor))
