"""Keeps in half what backward needs of a function that ran in float32 for want of half kernels.

Else such a function would hold twice the memory until backward, and copies beside. Knows tensors
and torch's hooks for what autograd saves; nothing of functions, rules or modes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from amp_patch.kernels.tensor_values import is_infinite


class HalfSaving:
    """What autograd saves of one call, in the half dtype of the call's result.

    A tensor that is the float32 cast of a half one, or whose half cast is the result, is not
    copied: the half one is kept. One in between that float16 does not hold stays in float32.

    Args:
        dtype: the half dtype.
        rounds: whether what is in between may be rounded; else it stays in float32.
    """

    def __init__(self, dtype: torch.dtype, rounds: bool = True) -> None:
        self._dtype, self._rounds = dtype, rounds
        self._saved: list[_Saved] = []
        self._halves: dict[int, tuple[Tensor, Tensor]] = {}

    def hooks(self) -> AbstractContextManager[object]:
        """Return the context to call the function in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def note(self, wide: Tensor, half: Tensor) -> None:
        """Say that a float32 tensor, an argument or a result, has the values of a half one."""
        if _is_wide(wide) and half.dtype is self._dtype:
            self._halves[wide.data_ptr()] = wide.detach(), half.detach()

    def settle(self) -> None:
        """The call is over and its results are noted: let go of float32 tensors."""
        for saved in self._saved:
            saved.narrow(self._halves, self._dtype, self._rounds)
        self._saved.clear()
        self._halves.clear()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        if _is_wide(tensor):
            self._saved.append(saved)
        return saved


def _is_wide(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided  # not sparse


def _in_half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in half where that is known to hold it, else as it is.

    A node of a graph may have more neighbours than float16 counts to. A GPU is not asked: the host
    would wait for its answer.
    """
    if dtype is torch.float16 and not tensor.is_cpu:
        return tensor
    narrow = tensor.to(dtype)
    return tensor if dtype is torch.float16 and is_infinite(narrow) else narrow


class _Saved:
    """A tensor that is kept for backward, which must not be written to until then."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._keep(tensor)

    def narrow(
        self, halves: dict[int, tuple[Tensor, Tensor]], dtype: torch.dtype, rounds: bool
    ) -> None:
        tensor = self._tensor
        wide, half = halves.get(tensor.data_ptr(), (None, None))
        if wide is None or half is None:
            narrow = _in_half(tensor, dtype) if rounds else tensor
        elif wide.numel() == tensor.numel() and wide.is_contiguous() and tensor.is_contiguous():
            narrow = half.reshape(tensor.shape)
        else:
            narrow = tensor.to(dtype)
        self._keep(narrow)

    def read(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation; got one that a function of a library needs, at version "
                f"{self._tensor._version} and not {self._version}; write the operation without "
                "the underscore, which makes a new tensor."
            )
        return self._tensor.to(self._dtype)

    def _keep(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version


def _unpack(saved: _Saved) -> Tensor:
    return saved.read()
