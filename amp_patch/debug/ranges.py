"""How large the values of tensors are, and which are not finite; knows single tensors only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from amp_patch.distributed.shards import local
from amp_patch.kernels import values

#: Half of float16's largest value: what is above is counted as near the limit.
NEAR_LIMIT = torch.finfo(torch.float16).max / 2
#: Below it float16 has fewer digits, down to none.
SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal

#: Kinds of values that are not finite, in the order in which they are told.
KINDS = ("inf", "-inf", "NaN")


@dataclass(frozen=True)
class Range:
    """The values of one tensor.

    Attributes:
        name: what it is to its module or operator.
        dtype: "float16".
        shape: its shape.
        smallest, largest: of the magnitudes of its finite values; None where it has none.
        kinds: which of `KINDS` it holds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float | None
    largest: float | None
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        kinds = " and ".join(self.kinds)
        if self.largest is None:
            shown = f"only {kinds}"
        else:
            shown = f"magnitudes {self.smallest:.3g} to {self.largest:.3g}"
            shown += f", and {kinds}" if kinds else ""
        return f"{self.name}: {self.dtype} {list(self.shape)}, {shown}"


def can_look(tensor: Any) -> bool:
    """Return whether a tensor holds floating or complex numbers that can be read."""
    return (
        isinstance(tensor, Tensor)
        and not is_lazy(tensor)
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.layout in (torch.strided, torch.sparse_coo)
        and not tensor.is_nested
        and tensor.element_size() > 1  # float8, of which torch computes no bounds
        and numbers_of(tensor).numel() > 0
    )


def storage_of(tensor: Tensor) -> int:
    """Return a number that tensors which share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


@torch.no_grad()
def numbers_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor: of complex ones both parts, of split ones the rank's."""
    return values(local(tensor.detach()).resolve_conj())


@torch.no_grad()
def kinds_of(tensor: Tensor) -> tuple[str, ...]:
    """Return which of `KINDS` a tensor holds; most often none, which is one pass."""
    numbers = numbers_of(tensor)
    low, high = (bound.item() for bound in torch.aminmax(numbers))
    if math.isfinite(low) and math.isfinite(high):
        return ()
    tests = (numbers == math.inf, numbers == -math.inf, numbers.isnan())
    return tuple(kind for kind, test in zip(KINDS, tests, strict=True) if test.any())


def kinds_in(tensors: Iterable[Any]) -> set[str]:
    """Return which of `KINDS` any of the tensors holds."""
    return {kind for one in tensors if can_look(one) for kind in kinds_of(one)}


@torch.no_grad()
def range_of(name: str, tensor: Tensor) -> Range:
    """Return the range of a tensor's values."""
    numbers = numbers_of(tensor).float()
    finite = numbers[numbers.isfinite()].abs()
    smallest, largest = (finite.min().item(), finite.max().item()) if len(finite) else (None, None)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Range(name, dtype, tuple(tensor.shape), smallest, largest, kinds_of(tensor))


def ranges_of(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[Range, ...]:
    """Return the ranges of those tensors that can be looked at, by their names."""
    return tuple(
        range_of(name, tensor) for name, tensor in dict(tensors).items() if can_look(tensor)
    )


@torch.no_grad()
def largest_of(tensors: Iterable[Any]) -> float:
    """Return the largest magnitude in any of the tensors; 0 where none can be looked at."""
    bounds = [torch.stack(torch.aminmax(numbers_of(one))) for one in tensors if can_look(one)]
    return max((abs(one) for bound in bounds for one in bound.tolist()), default=0.0)


def largest_scale(peak: float) -> float:
    """Return the largest power of two that keeps a magnitude within float16; 0 for none above 0."""
    if not 0.0 < peak < math.inf:
        return 0.0 if peak else math.inf
    return 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / peak))
