"""What happens between two calls of ``GradScaler.update``, after which the scale has moved once.

Knows what was prepared for optimizers, and how a scale moves; no method of GradScaler.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from amp_patch.common.scales import Scale
from amp_patch.gradients.foreign_gradients import Watch
from amp_patch.kernels import GradCheck
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.step.loss_scaling import Found, LossScaling
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.skip import Skip


class _Unreached(NamedTuple):
    """Of an optimizer whose gradients the backward of a scaled loss did not write.

    Attributes:
        ended: how many steps there were of it.
        watch: its gradients as they were.
        scale: of the loss.
    """

    ended: int
    watch: Watch
    scale: Scale


class ScalerCycle:
    """What happened since the last ``GradScaler.update``.

    Args:
        scalers: of which the first moves.

    Attributes:
        stepped: the optimizers that were stepped.
        checks: of optimizers that were not given to `amp.initialize`.
    """

    def __init__(self, scalers: Sequence[LossScaler]) -> None:
        self._scalers = scalers
        self.stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.checks: weakref.WeakKeyDictionary[Any, GradCheck] = weakref.WeakKeyDictionary()
        self._unreached: dict[OptimizerStep, _Unreached] = {}
        self._waits: LossScaling | None = None
        self._has_moved = False

    def once(self, scaling: LossScaling) -> LossScaling:
        """Return the same scaling, by which the scale moves once until `end`, as there.

        Several optimizers may step in between.
        """
        return _OneMove(scaling, self)

    def take_in(self, scaling: LossScaling, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        """Move the scale at the first overflow; where there is none, `end` does it."""
        if not any(check.overflow for check, _ in found):
            self._waits = scaling
        elif not self._has_moved:
            self._has_moved = True
            scaling.update(found, skips)
        else:
            scaler = self._scalers[0]
            for skip in skips:
                skip.ask(scaler.skip_message(0), scaler)

    def note_unreached(self, steps: Iterable[OptimizerStep], scale: Scale) -> None:
        """The backward of a loss times ``scale`` is over, which was for these optimizers."""
        for step in steps:
            if step.backward.gradients.scaled.scale is None:
                watch = step.backward.others.watch_own()
                self._unreached[step] = _Unreached(step.ended, watch, scale)
            else:
                self._unreached.pop(step, None)

    def take_unreached(self, step: OptimizerStep) -> None:
        """Take gradients for scaled that a later backward of the cycle wrote, as torch does.

        It may have gone on where that of the scaled loss had ended.
        """
        known = self._unreached.pop(step, None)
        if known is None or known.ended != step.ended:
            return
        if step.backward.others.wrote_own(known.watch):
            step.backward.gradients.scaled.begin(known.scale, is_assumed=True)

    def end(self) -> None:
        """``update`` was called: the scale grows if nothing overflowed."""
        if self._waits is not None and not self._has_moved:
            self._waits.update([], [])


class _OneMove:
    """See `ScalerCycle.once`."""

    def __init__(self, scaling: LossScaling, cycle: ScalerCycle) -> None:
        self._scaling, self._cycle = scaling, cycle
        self.is_on = scaling.is_on

    def scale(self) -> Scale:
        return self._scaling.scale()

    def update(self, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        self._cycle.take_in(self._scaling, found, skips)

    def moves(self, scaler: LossScaler) -> bool:
        return self._scaling.moves(scaler)
