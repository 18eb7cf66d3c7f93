"""Half gradients as a backward left them, checked and not yet unscaled; knows no optimizer."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels import CudaCheck

_VERSION = operator.attrgetter("_version")


class HalfGradients:
    """The gradients of half parameters, for a kernel that unscales them itself.

    Args:
        grads: multiplied by ``scale``; they stay as they are until this is not needed any more.
        scale: the loss scale, a number or a tensor of one element on the device.
        check: what was found in them, and in others checked at the same time.
        rows: their places in the check.

    Attributes:
        clip: a factor for the unscaled gradients, 0-dim fp32, or None.
    """

    def __init__(
        self, grads: Sequence[Tensor], scale: float | Tensor, check: CudaCheck, rows: Sequence[int]
    ) -> None:
        self.grads, self.scale = list(grads), scale
        self._check, self._checked_as = check, list(rows)
        self.clip: Tensor | None = None
        self._versions = list(map(_VERSION, self.grads))

    def norm(self) -> Tensor:
        """Return the 2-norm of all, unscaled and clipped, 0-dim fp32."""
        norm = self._check.norm_of(self._checked_as)
        return norm if self.clip is None else norm * self.clip

    @torch.no_grad()
    def make(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the gradients of these rows unscaled, clipped, in fp32.

        Raises:
            RuntimeError: see `refuse_written`.
        """
        self.refuse_written(rows)
        sources = [self.grads[row] for row in rows]
        targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
        kernels.Unscale(sources, targets).run(sources, targets, self.scale)
        if self.clip is not None:
            kernels.multiply(targets, self.clip)
        return targets

    def refuse_written(self, rows: Sequence[int]) -> None:
        """Raise if somebody wrote to the gradients of these rows: what they were is lost.

        Raises:
            RuntimeError: as said.
        """
        written = sum(self.grads[row]._version != self._versions[row] for row in rows)
        if written:
            raise RuntimeError(
                "with fused_step=True the gradients of half parameters must stay, from the end of "
                f"scale_loss() until optimizer.step(), as backward() left them; got {written} of "
                f"{len(rows)} written to in place. Write to the gradients of "
                "amp.master_params(optimizer), call amp.clip_grad_norm_(optimizer, ...) to clip, "
                "and clear gradients before a backward() outside of scale_loss()."
            )
