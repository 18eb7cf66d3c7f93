"""Half gradients as a backward left them, checked and not yet unscaled; knows no optimizer.

From the backward to the step they stand for fp32 ones, which would take twice their memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.casting.mode import HALVES
from amp_patch.kernels import CudaGradCheck, torch_kernels
from amp_patch.kernels.getters import VERSION
from amp_patch.kernels.strips import cut


class UnscaledLater:
    """Half gradients that are unscaled when the step reads them.

    Args:
        grads: multiplied by ``scale``; they stay as they are until this is not needed any more.
        scale: the loss scale, a number or a tensor of one element on the device.
        masters: of which these are gradients; None: what is unscaled lies as these do. A master may
            lie in another order, and torch's fused optimizers go through both as they lie.

    Attributes:
        clip: a factor for the unscaled gradients, 0-dim fp32, or None.
        versions: of the gradients, as they came.
    """

    is_half = True

    def __init__(
        self,
        grads: Sequence[Tensor],
        scale: float | Tensor,
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        self.grads, self.scale = list(grads), scale
        self._models = self.grads if masters is None else masters
        self.clip: Tensor | None = None
        self.versions = list(map(VERSION, self.grads))

    @torch.no_grad()
    def make(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the gradients of these rows unscaled, clipped, in fp32.

        Raises:
            RuntimeError: see `refuse_written`.
        """
        self.refuse_written(rows)
        sources = [self.grads[row] for row in rows]
        models = [self._models[row] for row in rows]
        targets = [torch.empty_like(model, dtype=torch.float32) for model in models]
        kernels.unscale(sources, targets, self.scale)
        if self.clip is not None:
            kernels.multiply(targets, self.clip)
        return targets

    def refuse_written(self, rows: Sequence[int]) -> None:
        """Raise if somebody wrote to the gradients of these rows: what they were is lost.

        Raises:
            RuntimeError: as said.
        """
        # all at once, but not for each row that is asked for alone
        if len(rows) == len(self.grads) and list(map(VERSION, self.grads)) == self.versions:
            return
        written = sum(self.grads[row]._version != self.versions[row] for row in rows)
        if written:
            self._refuse(written, len(rows))

    def refuse_write_to(self, grad: Tensor) -> None:
        """Raise if a gradient, to which somebody has written, waits here.

        Raises:
            RuntimeError: see `refuse_written`.
        """
        if any(grad is one for one in self.grads):
            self._refuse(1, len(self.grads))

    def _refuse(self, count: int, total: int) -> NoReturn:
        raise RuntimeError(
            "with fused_step=True the gradients of half parameters must stay, from the end of "
            f"scale_loss() until optimizer.step(), as backward() left them; got {count} of "
            f"{total} written to in place. Write to the gradients of "
            "amp.master_params(optimizer), call amp.clip_grad_norm_(optimizer, ...) to clip, "
            "and clear gradients before a backward() outside of scale_loss()."
        )


class HalfGradients(UnscaledLater):
    """Half gradients that kernels have checked, and are to step with.

    Args:
        grads, scale, masters: see `UnscaledLater`.
        check: what was found in them, and in others checked at the same time.
        rows: their places in the check.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        scale: float | Tensor,
        check: CudaGradCheck,
        rows: Sequence[int],
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__(grads, scale, masters)
        self._check, self._checked_as = check, list(rows)

    def squares(self) -> list[Tensor]:
        """Return sums of the squares of all, unscaled and clipped: float64, one for each device."""
        squares = self._check.squares_of(self._checked_as)
        clip = self.clip
        return squares if clip is None else [one * clip.to(one).square() for one in squares]


class LargeInHalf:
    """Gradients of which the large ones wait in half; small ones are there, in fp32.

    Args:
        grads: fp32, or half and multiplied by ``scale``.
        scale: the loss scale.
        masters: of which these are gradients, see `UnscaledLater`.
    """

    is_half = True

    def __init__(self, grads: Sequence[Tensor], scale: float, masters: Sequence[Tensor]) -> None:
        self._grads, self._masters = list(grads), masters
        large = [row for row, grad in enumerate(grads) if grad.dtype in HALVES]
        self._places = {row: place for place, row in enumerate(large)}
        self._large = UnscaledLater([grads[row] for row in large], scale)
        self._scale = scale

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return torch_kernels.inverse_of(self._scale)

    @property
    def is_clipped(self) -> bool:
        """True where large ones are to be multiplied by a factor when they are unscaled."""
        return self._large.clip is not None

    def refuse_write_to(self, grad: Tensor) -> None:
        """See `UnscaledLater.refuse_write_to`."""
        self._large.refuse_write_to(grad)

    def refuse_written(self) -> None:
        """See `UnscaledLater.refuse_written`, of all that wait in half."""
        self._large.refuse_written(range(len(self._places)))

    @torch.no_grad()
    def make(self, rows: Sequence[int]) -> list[Tensor]:
        """See `UnscaledLater.make`."""
        places = self._places
        self._large.refuse_written([places[row] for row in rows if row in places])
        made = []
        for row in rows:
            grad = self._grads[row]
            if row in places:
                master = self._masters[row]
                lies_alike = grad.stride() == master.stride()
                grad = self._unscaled(grad, None if lies_alike else torch.empty_like(master))
            made.append(grad)
        return made

    def _unscaled(self, half: Tensor, into: Tensor | None = None) -> Tensor:
        # The bits of `kernels.unscale`: times one number, not 0-dim, it is fp32.
        if half.is_cpu:  # where torch would make a copy in fp32 before it multiplies
            exact = half.float() if into is None else into.copy_(half)
            exact = exact if self._scale == 1.0 else exact.mul_(self._inverse)
        else:
            exact = torch.mul(half, self._inverse.to(half.device), out=into)
        return exact if self._large.clip is None else exact.mul_(self._large.clip)

    def stored(self, row: int) -> Tensor:
        """Return the gradient of this row as it is in memory: unscaled only where it is in fp32."""
        return self._grads[row]

    def strips(self, row: int, length: int) -> Iterator[Tensor]:
        """Yield what `make` returns for a row in strips, each in the memory of the one before.

        Args:
            row: of a gradient that `strips.cut` can cut.
            length: of a strip.

        Raises:
            RuntimeError: see `UnscaledLater.refuse_written`.
        """
        grad = self._grads[row]
        if row not in self._places:
            yield from cut(grad, length)
            return
        self._large.refuse_written([self._places[row]])
        memory = torch.empty(length, dtype=torch.float32, device=grad.device)
        for half in cut(grad, length):
            yield self._unscaled(half, memory[: half.numel()])

    def clip(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor, 0-dim fp32; may be called once."""
        small = [grad for row, grad in enumerate(self._grads) if row not in self._places]
        kernels.multiply(small, factor)
        self._large.clip = factor
