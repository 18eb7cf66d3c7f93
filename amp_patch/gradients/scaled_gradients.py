"""Gradients that ``scale_loss(..., delay_unscale=True)`` left multiplied by a loss scale.

The next backward adds to them, so they follow the scale where it moves in between. Knows parameters
and their gradients; no optimizer and no master.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.common.scales import Scale
from amp_patch.distributed.shards import local
from amp_patch.weights.parameter_lists import store_grad, stored_grad

from .foreign_gradients import Watch
from .param_pairs import ParamPairs

T = TypeVar("T")


class _Copied(NamedTuple):
    """A half gradient and its float32 copy at the master, with the versions that both had then."""

    param: Tensor
    master: Tensor
    half: Tensor
    copy: Tensor
    versions: tuple[int, int]

    def is_newer_in_half(self) -> bool:
        """Tell whether a script has written to the half gradient, or replaced it, and no copy."""
        half, copy = stored_grad(self.param), stored_grad(self.master)
        if copy is not self.copy or copy._version != self.versions[1]:
            return False
        return half is not self.half or half._version != self.versions[0]


_NOTHING = Watch.of([])


class ScaledGradients:
    """The scale of such gradients, and whether a backward has written to them.

    Attributes:
        scale: what they are multiplied by; None where there are none.
        is_assumed: whether that is not known: a backward between those of scaled losses wrote them.
    """

    def __init__(self) -> None:
        self.scale: Scale | None = None
        self.is_assumed = False
        self._before = _NOTHING
        self._copied: list[_Copied] = []

    def begin(self, scale: Scale, is_assumed: bool = False) -> None:
        """The gradients that are there now are multiplied by ``scale``."""
        self._before = _NOTHING
        self.scale, self.is_assumed = scale, is_assumed

    def go_on(self, scale: Scale) -> None:
        """A further backward is over, after `bring_to` where there were some."""
        unknown = self.scale is not None and self.is_assumed and not self.were_written()
        self.begin(scale, is_assumed=unknown)

    def forget(self) -> None:
        """There are none any more."""
        self._before = _NOTHING
        self.scale, self.is_assumed = None, False

    @torch.no_grad()
    def bring_to(self, scale: Scale, params: Sequence[Tensor]) -> None:
        """Multiply them so that a backward of a loss times ``scale`` may add to them."""
        if self.scale is not None:
            bring_to(scale, self.scale, [p.grad for p in params if p.grad is not None])
            self.scale = scale
        self._before = Watch.of(params)

    @contextlib.contextmanager
    def shown(self, pairs: ParamPairs) -> Iterator[None]:
        """Let what is stepped have them unscaled in the block, to be read.

        They are of this rank alone, or of some micro-batches, and wait scaled for a later backward.
        What the block clears is cleared where they wait.
        """
        scale = self.scale
        if scale is None:
            yield
            return
        waiting = [
            _Waiting(param, stepped, param.grad, None if stepped is param else stepped.grad)
            for param, stepped in zip(*pairs, strict=True)
            if param.grad is not None
        ]
        with torch.no_grad():
            for one in waiting:
                one.stepped.grad = one.sum(scale)
        try:
            yield
        finally:
            for one in waiting:
                one.put_back(was_forgotten=self.scale is None)

    def copy_to_masters(self, pairs: ParamPairs) -> None:
        """Let masters that have none have copies, scaled, for a script to read and write.

        Once, until `follow`, which is to be called before the half ones are used.
        """
        for param, master in () if self._copied else pairs.halves():
            grad = stored_grad(param)
            if grad is not None and stored_grad(master) is None:
                copy = grad.detach().to(master.dtype, copy=True)
                store_grad(master, copy)
                versions = grad._version, copy._version
                self._copied.append(_Copied(param, master, grad, copy, versions))

    @torch.no_grad()
    def follow(self) -> None:
        """Have the half ones hold, rounded, what a script has made of the copies, which go.

        A half gradient that it has written to stays, where the copy has the version that it had.
        Else nobody asks whether it has written: a collective moves no version. What it has cleared,
        at the one or the other, is cleared.
        """
        copied, self._copied = self._copied, []
        for one in copied:
            grad, half = stored_grad(one.master), stored_grad(one.param)
            if grad is None:
                store_grad(one.param, None)
            elif half is not None and not one.is_newer_in_half():
                half.copy_(grad)  # in place, for it may lie in a bucket of DDP
            store_grad(one.master, None)

    def were_written(self) -> bool:
        """Return whether a backward has written to them since `bring_to`."""
        return not self._before.is_unchanged()


class _Waiting(NamedTuple):
    """A parameter whose gradient waits scaled, and what it is stepped by, with what that has."""

    param: Tensor
    stepped: Tensor
    scaled: Tensor
    unscaled: Tensor | None

    def sum(self, scale: Scale) -> Tensor:
        grad = self.scaled.to(self.stepped.dtype) / scale
        return grad if self.unscaled is None else grad + self.unscaled

    def put_back(self, was_forgotten: bool) -> None:
        """Leave the two as they were, but for what was cleared, or written to 0 and forgotten."""
        if self.stepped.grad is None:
            self.param.grad = None
        elif self.stepped is not self.param:
            self.stepped.grad = self.unscaled
        elif not was_forgotten:
            self.param.grad = self.scaled


@torch.no_grad()
def bring_to(scale: Scale, old: Scale, grads: Sequence[Tensor]) -> None:
    """Multiply gradients that have a scale so that they have another one, in place."""
    if _are_equal(scale, old):
        return
    factor, numbers = scale / old, [kernels.values(local(grad)) for grad in grads]
    if isinstance(factor, Tensor):
        kernels.multiply(numbers, factor)
    elif numbers:
        torch._foreach_mul_(numbers, factor)


def by_scale(rows: Iterable[tuple[T, Scale]]) -> list[tuple[Scale, list[T]]]:
    """Return what has the same scale together: the scale, and all that has it."""
    found: dict[float, tuple[Scale, list[T]]] = {}
    for one, scale in rows:
        key = id(scale) if isinstance(scale, Tensor) else scale
        found.setdefault(key, (scale, []))[1].append(one)
    return list(found.values())


def _are_equal(scale: Scale, other: Scale) -> bool:
    """Return whether two scales are known to be equal, without waiting for a device."""
    if isinstance(scale, Tensor) or isinstance(other, Tensor):
        return scale is other
    return scale == other
