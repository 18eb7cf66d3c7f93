"""When an optimizer's masters are rounded into its half weights: in each step, again if it failed.

Knows one optimizer and where it is in its step; `MasterWeights` knows how masters are rounded.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.master_weights import MasterWeights

from .replaced_methods import takes_hooks
from .writes_in_step import WritesInStep


class Phase(enum.Enum):
    """Where an optimizer is between two steps, or in one.

    ``UNPUBLISHED`` is left where masters could not be rounded into the half weights: it is tried
    again before these are used.
    """

    REST = enum.auto()  # the half weights are the masters, rounded
    STEPS = enum.auto()  # the masters are being changed
    PUBLISHED = enum.auto()  # still in the step, whose hooks and rest see the new half weights
    UNPUBLISHED = enum.auto()


_IN_STEP = (Phase.STEPS, Phase.PUBLISHED)


class Publication:
    """Publishes the masters of one optimizer; without masters it only knows the phase.

    Args:
        optimizer: held weakly; gets hooks where there are masters.
        wrapped: optimizers that it steps itself, or that are stepped in its place.
        masters: of its half weights; None where it steps the weights themselves.
        fused: steps in its place, and may publish itself; None where it steps itself.
        is_foreign, follow_gradients: see `WritesInStep`.

    Attributes:
        phase: where the optimizer is; set to ``STEPS`` by who makes a step, and calls `end` then.
        writes: to half weights while the masters are stepped; None without masters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrapped: Sequence[Optimizer],
        masters: MasterWeights | None,
        fused: FusedStep | None,
        is_foreign: bool,
        follow_gradients: Callable[[], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._masters, self._fused = masters, fused
        self.phase = Phase.REST
        self._hook: RemovableHandle | None = None
        self.writes: WritesInStep | None = None
        if masters is not None:
            self._hook = self._publish_before_other_hooks(optimizer)
            self.writes = WritesInStep(optimizer, wrapped, masters, is_foreign, follow_gradients)

    def remove(self) -> None:
        """Take the hooks off again."""
        if self._hook is not None:
            self._hook.remove()
        if self.writes is not None:
            self.writes.remove()

    @property
    def is_stepping(self) -> bool:
        """True from the beginning of a step to its end, hooks included."""
        return self.phase in _IN_STEP

    def end(self) -> None:
        """The step has ended; its hooks were not called after an error, or where it calls none."""
        if self.phase is Phase.STEPS and self._masters is not None:
            self.phase = Phase.UNPUBLISHED
            self.publish()
        else:
            self.phase = Phase.REST

    def publish(self) -> None:
        """Round the masters into the half weights; also called where an earlier try failed."""
        masters, writes, phase = self._masters, self.writes, self.phase
        is_published = phase is Phase.REST or phase is Phase.PUBLISHED
        # once more in one step: of a subclass, which has published in super().step()
        is_followed = writes is not None and is_published and writes.follow()
        if masters is not None and writes is not None and not is_followed:
            if not is_published:
                writes.tell()
            masters.publish(self._fused is not None and self._fused.has_published)
            writes.published()
        self.phase = Phase.PUBLISHED if phase in _IN_STEP else Phase.REST

    def _publish_before_other_hooks(self, optimizer: Optimizer) -> RemovableHandle | None:
        """Let the step hooks of users (a moving average of the weights) see what was stepped."""
        if not takes_hooks(optimizer, "_optimizer_step_post_hooks"):
            return None
        handle = optimizer.register_step_post_hook(self._publish_of)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        return handle

    def _publish_of(self, stepped: Optimizer, *_: object) -> None:
        """A step ends that calls these hooks: the optimizer's, or that of one that it wraps.

        Where the two share one dict of hooks, as some Lookaheads do, the wrapping step goes on to
        write to the masters, and calls no hook when it ends.
        """
        self.publish()
        if self.phase in _IN_STEP and stepped is not self._optimizer():
            self.phase = Phase.STEPS
