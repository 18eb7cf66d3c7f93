"""The bits of half tensors: whether they are those of an fp32 value, rounded, and what they add to.

Of many tensors small ones are asked at once, and a device is waited for once. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from amp_patch.levels import HALVES

#: A prime, of which rows of no layer have a multiple.
_STRIDE = 1021
#: So many numbers are compared as fast as they are viewed as others.
_FEW = 1024
#: Tensors with fewer numbers are small: halves of so many fit in as many integers of 64 bits.
_SMALL = 4 * _STRIDE
#: So many numbers are added up together: their copies stay in a CPU's cache.
_STRIP = 1 << 17
_STRIP_OF_A_DEVICE = 1 << 22


def is_plain(tensor: Tensor) -> bool:
    """Return whether torch alone answers for a tensor, and it has numbers: FSDP1's are freed.

    Classes of parameters that change no call of torch, as masters have, are as good as torch's.
    """
    kind = type(tensor)
    if not (kind is Tensor or kind is nn.Parameter or _is_torchs(kind)) or tensor.is_meta:
        return False
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0


def _is_torchs(kind: type[Tensor]) -> bool:
    has_function = kind.__torch_function__ is not nn.Parameter.__torch_function__
    return not has_function and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def bits_of(tensor: Tensor) -> Tensor:
    """Return integers that tell whether a plain tensor was written to.

    Each is the sum of integers that lie `_STRIDE` apart: to flip rows or columns changes them.
    """
    if _is_small(tensor):
        return tensor.detach().flatten().view(torch.int16).clone()
    words, rest = _words(tensor)
    count = words.numel() // _STRIDE
    rows, tail = words[: count * _STRIDE].view(count, _STRIDE), words[count * _STRIDE :]
    return torch.cat([rows.sum(0), tail, rest])


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, 0-dimensional, which a write changes.

    And no other order of its memory: `model.to(memory_format=...)` gives gradients one, too. In
    strips, for torch copies integers to such of 64 bits before it adds them up: in half, to four
    times the memory of the tensor, and most of the time goes there. To add up integers of 64 bits
    at once would lose what is carried: to double each second number would change nothing.
    """
    bits = tensor.detach().view(_fitting(tensor))
    if _is_small(tensor):
        return bits.sum()
    strips = bits.flatten().split(_STRIP if tensor.is_cpu else _STRIP_OF_A_DEVICE)
    return torch.stack([strip.sum() for strip in strips]).sum()


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits; quick, on a CPU.

    torch compares numbers in half one by one there, and takes twelve times as long. Of few numbers,
    which that compares at once, and of others than plain ones, False.
    """
    if other.numel() < _FEW or not (one.is_cpu and other.is_cpu and is_plain(other)):
        return False
    mine, theirs = _integers(one), _integers(other)
    return mine.dtype is theirs.dtype and torch.equal(mine, theirs)


def can_be_compared(value: Tensor, half: Tensor) -> bool:
    """Return whether `compared` takes the two."""
    is_alike = value.shape == half.shape and value.device == half.device
    has_dtypes = value.dtype is torch.float32 and half.dtype in HALVES
    return is_alike and has_dtypes and is_plain(half) and is_plain(value)


def compared(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return of each value and half tensor whether the latter is the former, rounded.

    Small ones are told by their bits, and large ones on a CPU: there a NaN may be another.

    Args:
        pairs: which `can_be_compared`.
    """
    groups: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
    for row, (_, half) in enumerate(pairs):
        groups.setdefault((half.device, half.dtype, _is_small(half)), []).append(row)
    found = [True] * len(pairs)
    for (_, _, are_small), rows in groups.items():
        chosen = [pairs[row] for row in rows]
        differ = _small_ones_that_differ(chosen) if are_small else _that_differ(chosen)
        for row in compress(rows, differ):
            found[row] = False
    return found


def _small_ones_that_differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    values = torch._C._nn.flatten_dense_tensors([value for value, _ in pairs])
    rounded = values.to(pairs[0][1].dtype).view(torch.int16)
    # Of their bits, for autocast on a CPU puts no tensors in float16 together.
    held = torch._C._nn.flatten_dense_tensors([half.view(torch.int16) for _, half in pairs])
    if torch.equal(rounded, held):
        return [False] * len(pairs)
    parts = rounded.ne(held).split([half.numel() for _, half in pairs])
    return torch.stack([part.any() for part in parts]).tolist()


def _that_differ(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    if pairs[0][1].is_cpu:
        return [
            not torch.equal(_integers(value.to(half.dtype)), _integers(half))
            for value, half in pairs
        ]
    flags = [value.to(half.dtype).ne(half).any() for value, half in pairs]
    return torch.stack(flags).tolist()


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() < _SMALL


def _integers(tensor: Tensor) -> Tensor:
    """View the bits of a plain tensor, flat, as integers of 64 bits where these fit: faster."""
    flat, size = tensor.detach().flatten(), tensor.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_fitting(tensor))


def _fitting(tensor: Tensor) -> torch.dtype:
    """Return the integers of as many bits as a tensor's elements have, 16 or 32."""
    return torch.int16 if tensor.element_size() == 2 else torch.int32


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """View the bits of a plain tensor that is large, flat, as integers of 64 bits.

    Returns:
        These, and as integers of fewer bits the few elements that are left.
    """
    flat, each = tensor.detach().flatten(), 8 // tensor.element_size()
    if flat.storage_offset() % each:  # no integer of 64 bits begins there
        flat = flat.clone()
    whole = flat.numel() // each * each
    return flat[:whole].view(torch.int64), flat[whole:].view(_fitting(tensor))
