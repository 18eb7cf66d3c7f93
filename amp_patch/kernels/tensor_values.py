"""What tensors hold, asked in the ways in which torch answers fast and takes little memory.

On a CPU it has no vector code for what makes truth values of numbers, and it copies these to
integers of 64 bits before it counts them. The least and the largest number it finds thirty times as
fast. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Of numbers in 8 bits torch finds no extremes.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: Of fewer numbers each call takes longer than what it does.
_FEW = 1 << 14
#: So many numbers are looked at together, in the memory of the ones before.
_STRIP = 1 << 17
#: On a device each call is launched by the host. Float32 counts to as many.
_STRIP_OF_A_DEVICE = 1 << 24


def is_large(numbers: Tensor) -> bool:
    """Return whether it matters how a tensor is asked: a large one of real numbers, on a CPU."""
    is_plain = numbers.dtype in _DTYPES and numbers.layout is torch.strided
    return numbers.is_cpu and is_plain and numbers.numel() > _FEW


def is_any(numbers: Tensor) -> Tensor:
    """Return ``numbers.any()``, 0-dim bool on their device: NaN is not 0, and -0.0 is."""
    if not is_large(numbers):
        return numbers.any()
    low, high = numbers.aminmax()
    return low.ne(0.0).logical_or(high.ne(0.0))


def largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude of real numbers, 0-dim; float32 of half ones; NaN beside NaN."""
    low, high = numbers.aminmax()
    found = torch.maximum(low.neg(), high).abs()
    return found.float() if numbers.element_size() == 2 else found


def same_numbers(numbers: Tensor, others: Tensor) -> Tensor:
    """Return whether others, of the same shape, are these in their dtype; 0-dim bool.

    NaN is as NaN, and 0.0 as -0.0. The first strip that differs ends it on a CPU.
    """
    if not is_large(numbers):
        return _are_equal(numbers, others.to(numbers))
    parts = (one.reshape(-1).split(_STRIP) for one in (numbers, others))
    is_same = all(_have_equal(one, other.to(one)) for one, other in zip(*parts, strict=True))
    return numbers.new_full((), is_same, dtype=torch.bool)


def _have_equal(one: Tensor, other: Tensor) -> bool:
    bits = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(bits), other.view(bits)) or bool(_are_equal(one, other))


def _are_equal(one: Tensor, other: Tensor) -> Tensor:
    return torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all()


def is_infinite(numbers: Tensor) -> Tensor:
    """Return whether one is infinite; 0-dim bool on their device."""
    if is_large(numbers) and largest(numbers).isfinite():
        return numbers.new_zeros((), dtype=torch.bool)
    return numbers.isinf().any()


def are_nonfinite(numbers: Tensor) -> Tensor:
    """Return whether one is infinite, and whether one is NaN; bool of shape (2,)."""
    if is_large(numbers) and largest(numbers).isfinite():
        return numbers.new_zeros(2, dtype=torch.bool)
    return torch.stack([numbers.isinf().any(), numbers.isnan().any()])


def count_nonfinite(numbers: Tensor) -> Tensor:
    """Return how many are infinite, and how many NaN; int64 of shape (2,)."""
    if is_large(numbers) and largest(numbers).isfinite():
        return numbers.new_zeros(2, dtype=torch.int64)
    if numbers.numel() <= _FEW:
        return torch.stack([numbers.isinf().sum(), numbers.isnan().sum()])
    length = _STRIP if numbers.is_cpu else _STRIP_OF_A_DEVICE
    found = [_counted(strip) for strip in numbers.reshape(-1).split(length)]
    return torch.stack(found).sum(0, dtype=torch.int64)


def _counted(strip: Tensor) -> Tensor:
    """Return the same of few enough that float32 counts them, in float32."""
    wide = strip.to(torch.promote_types(strip.dtype, torch.float32), copy=True)
    # A comparison into numbers is vectorised, where one that makes truth values is not.
    nans = torch.ne(wide, wide, out=torch.empty_like(wide)).sum()
    return torch.stack([wide.abs_().eq_(torch.inf).sum(), nans]).float()
