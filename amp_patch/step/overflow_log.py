"""The last overflow of each loss scaler: which gradients were not finite, and how far.

Knows checks of gradients and names of parameters; written to at an overflow only, and holds
numbers, no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch.kernels import values
from amp_patch.kernels.tensor_values import count_nonfinite

from .loss_scaling import Found


class NonFinite(NamedTuple):
    """A parameter whose gradient was not finite.

    Attributes:
        name: its path in the model; its shape where no initialized model has it.
        kinds: "inf", "NaN" or "inf and NaN".
        numel: how many elements the gradient has; of a sparse one, those that it stores.
        infs, nans: how many of them are so; None where the gradient was gone.
    """

    name: str
    kinds: str
    numel: int
    infs: int | None
    nans: int | None


class Overflow(NamedTuple):
    """What is known of an overflow.

    Attributes:
        scaler_id: the number of the loss scaler.
        scale: that the loss was multiplied by.
        step_number: the number of the optimizer's step that was to come, from 1.
        params: the parameters whose gradients were not finite, in the optimizers' order; None
            where nobody can tell any more.
        total: how many parameters got a gradient.
        skips: how many overflows of this scaler there were, this one included.
    """

    scaler_id: int
    scale: float
    step_number: int
    params: tuple[NonFinite, ...] | None
    total: int
    skips: int


class OverflowLog:
    """The last overflow of each loss scaler."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Overflow, list[Rows]]] = {}

    def note(
        self,
        scaler_id: int,
        scale: float,
        step_number: int,
        found: Sequence[Found],
        name_of: Callable[[Tensor], str],
    ) -> None:
        """Write down an overflow, in place of the scaler's last one. Waits for no device.

        Args:
            scaler_id: the number of the loss scaler.
            scale: what the loss was multiplied by.
            step_number: see `Overflow`.
            found: for each optimizer the check and its parameters.
            name_of: of a parameter, in the models.
        """
        skips = self._last[scaler_id][0].skips + 1 if scaler_id in self._last else 1
        total = sum(len(params) for _, params in found)
        is_known = bool(found) and all(check.is_known for check, _ in found)
        rows = [Rows(one, name_of) for one in found] if is_known else []
        overflow = Overflow(scaler_id, scale, step_number, None, total, skips)
        self._last[scaler_id] = overflow, rows

    def count(self, scaler_id: int) -> int:
        """Return how many overflows of a scaler there were."""
        return self._last[scaler_id][0].skips if scaler_id in self._last else 0

    def last(self) -> list[Overflow]:
        """Return the last overflow of each scaler that had one. May wait for a device."""
        return [
            overflow._replace(params=tuple(one for part in rows for one in part.read()))
            if rows
            else overflow
            for _, (overflow, rows) in sorted(self._last.items())
        ]


class Rows:
    """The gradients of one optimizer in an overflow, by name: which were not finite, and how far.

    Args:
        found: the check, and its parameters.
        name_of: of a parameter.
    """

    def __init__(self, found: Found, name_of: Callable[[Tensor], str]) -> None:
        check, params = found
        self._names = [name_of(param) for param in params]
        self._sizes = [param.numel() for param in params]
        self._flags = check.flags()
        grads = check.gradients()
        self._counts = None if grads is None else _count(grads)
        if grads is not None:
            self._sizes = [values(grad).numel() for grad in grads]

    def read(self) -> list[NonFinite]:
        """Return those that were not finite."""
        if self._counts is None:
            kinds = [] if self._flags is None else self._flags.nonfinite()
            return [
                NonFinite(self._names[row], kind, self._sizes[row], None, None)
                for row, kind in kinds
            ]
        pairs = [pair for counts in self._counts for pair in counts.tolist()]
        return [
            NonFinite(name, " and ".join(_kinds(infs, nans)), size, infs, nans)
            for name, size, (infs, nans) in zip(self._names, self._sizes, pairs, strict=True)
            if infs or nans
        ]


def _kinds(infs: int, nans: int) -> list[str]:
    return ["inf"] * bool(infs) + ["NaN"] * bool(nans)


@torch.no_grad()
def _count(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of inf and NaN, for each gradient int64 of shape (1, 2) on its device."""
    return [count_nonfinite(values(grad)).reshape(1, 2) for grad in grads]
