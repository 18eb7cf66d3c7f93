"""Large tensors in strips: pieces of their memory, stepped one after the other.

What an optimizer computes on the way, the gradient in fp32 first of all, then takes the memory of
one strip. Where each number of a tensor is stepped by the numbers at its place alone, the bits are
those of one step for all. Knows tensors; no optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from .tensor_lists import fills_memory

#: A strip holds a multiple of as many elements. Kernels take them some at a time, and what is left
#: at the end of a tensor by other instructions, which may round in another way.
_UNIT = 64


class Strips(NamedTuple):
    """The gradient of one parameter, in strips.

    Attributes:
        length: of each but the last one, in elements.
        grads: the strips in fp32, to be read once: each may be in the memory of the one before.
    """

    length: int
    grads: Iterable[Tensor]

    def rows(self, param: Tensor, *others: Tensor | None) -> Iterator[list[list[Tensor]]]:
        """Yield lists of one strip each: of the parameter, its gradient and other tensors.

        Args:
            param: stepped in place, strip by strip.
            others: that lie like it; None where an empty list is to stand for it.
        """
        count = -(-param.numel() // self.length)
        columns = [repeat(None, count) if one is None else cut(one, self.length) for one in others]
        for row in zip(cut(param, self.length), self.grads, *columns, strict=True):
            yield [[] if one is None else [one] for one in row]


def strip_length(elements: int, about: float) -> int | None:
    """Return how many elements a strip of a tensor has; None where one strip would do.

    Args:
        elements: of the tensor; up to half as many again as ``about`` are one strip.
        about: how many a strip should have.
    """
    count = round(elements / about)
    return None if count < 2 else -(-elements // (count * _UNIT)) * _UNIT


def lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have one shape and fill their memory in one order: cut as one."""
    layouts = {(tensor.shape, tensor.stride()) for tensor in tensors}
    return len(layouts) == 1 and fills_memory(tensors[0])


def in_order_of(model: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in the order of memory of another of its shape: itself, or else a copy."""
    stride = torch.empty_like(model, device="meta").stride()  # without the gaps of ``model``
    if tensor.stride() == stride:
        return tensor
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def cut(tensor: Tensor, length: int) -> Iterator[Tensor]:
    """Yield a tensor's memory in pieces, flat views of it, the last one shorter.

    Args:
        tensor: such as `lie_alike` returns True for.
        length: of each, in elements.
    """
    elements, offset = tensor.numel(), tensor.storage_offset()
    for begin in range(0, elements, length):
        yield tensor.as_strided((min(length, elements - begin),), (1,), offset + begin)
