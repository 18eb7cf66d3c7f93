"""One optimizer's gradients as they are clipped: over which ranks, and what follows them.

Knows its parameters and their gradients, which are unscaled; no loss scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.distributed.norms import clip_by_norm
from amp_patch.gradients.gradients import Gradients
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.parameter_lists import are_same

from .held_params import HeldParams

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


class ClippedGradients:
    """Clips what one optimizer steps, or hears of others who have.

    Args:
        optimizer: held weakly.
        held: its parameters.
        gradients: of these.
        fused: what steps in its place; None where it steps itself.
    """

    def __init__(
        self, optimizer: Optimizer, held: HeldParams, gradients: Gradients, fused: FusedStep | None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._held, self._gradients, self._fused = held, gradients, fused

    def clip(
        self,
        max_norm: float,
        norm_type: float,
        stages: ProcessGroup | None,
        device: torch.device | None,
        accept: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Clip all gradients, see `clip_by_norm`; may be left to the step, which unscales them.

        Returns:
            The total norm before, 0-dim.
        """
        optimizer = self._optimizer()
        may_wait = stages is None and norm_type == 2.0
        if self._fused is not None and optimizer is not None and may_wait:
            waiting = self._fused.clip(optimizer, max_norm, accept)
            if waiting is not None:
                return waiting
        grads = [grad for one in self._held.pairs().master if (grad := one.grad) is not None]
        ranks, whole = self._held.ranks, self.whole()
        total = clip_by_norm(grads, max_norm, norm_type, ranks, stages, device, whole, accept)
        self.note()
        return total

    def note(self, clipped: Sequence[Tensor] | None = None) -> None:
        """Gradients that are stepped were clipped: those of half parameters follow.

        Args:
            clipped: masters whose gradients these are, perhaps among others; None: all.
        """
        pairs = self._held.pairs()
        if clipped is not None and not are_same(clipped, pairs.master):
            ids = set(map(id, clipped))
            pairs = pairs.select([id(master) in ids for master in pairs.master])
        self._gradients.follow_clipping(pairs)

    def whole(self) -> set[int]:
        """Return the ids of gradients that are the same on all ranks, where others are parts."""
        parts, pairs = self._held.ranks.parts, self._held.pairs()
        if parts is None:
            return set()
        stepped = zip(pairs.model, pairs.master, strict=True)
        return {id(master.grad) for param, master in stepped if id(param) not in parts}
