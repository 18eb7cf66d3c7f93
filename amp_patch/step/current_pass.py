"""The backward pass that one optimizer is in: from the beginning of a ``scale_loss`` to its end."""

from __future__ import annotations

import threading
from typing import Protocol

from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.scales import Scale
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.reached_masters import ReachedMasters
from amp_patch.weights.own_gradients import OwnGradients

from .held_params import HeldParams
from .skip import Skip


class OpenPass(Protocol):
    """What is asked of a `BackwardPass` that was begun."""

    @property
    def is_left(self) -> bool:
        """Whether the pass was of a block that is gone, and was not ended."""

    def unscale_(self) -> None:
        """See `BackwardPass`."""

    def abandon(self) -> None:
        """See `BackwardPass`."""


class CurrentPass:
    """Knows whether an optimizer is in a pass, and ends it early where that is right.

    Args:
        held: its parameters.
        gradients: of these.
        skip: gets the check of a pass that is ended early.

    Attributes:
        is_open: True inside a ``scale_loss`` of this optimizer.
        scale: of that block; None outside of one.
        is_scaled: of this pass or the last one: False where the scale is 1, and hooks of the
            backward may step.
        reached: divides what comes to masters past the half parameters.
    """

    def __init__(self, held: HeldParams, gradients: Gradients, skip: Skip) -> None:
        self._pairs = held.pairs
        masters = held.masters
        self._own: OwnGradients | None = None if masters is None else masters.own_gradients
        self._gradients, self._skip = gradients, skip
        self._pass: OpenPass | None = None
        self._thread: int | None = None
        self.is_open, self.is_scaled = False, True
        self.scale: Scale | None = None
        self.reached = ReachedMasters()

    def open(
        self,
        backward_pass: OpenPass | None,
        reached: ParamPairs,
        scale: Scale,
        is_scaled: bool,
    ) -> None:
        """Begin a pass.

        Args:
            backward_pass: is ended where unscaled gradients are asked for before its end.
            reached: what its backward may reach.
            scale: factor of the loss.
            is_scaled: see above.
        """
        self.is_open, self._pass, self.is_scaled = True, backward_pass, is_scaled
        self.scale = scale
        self.note_thread()
        if self._own is not None:
            self._own.keeps_sums = False
            if is_scaled:
                self.reached.begin(reached, scale)

    def close(self) -> None:
        """The pass is over."""
        self.is_open, self._pass, self.scale = False, None, None
        self.reached.end()
        if self._own is not None:
            self._own.keeps_sums = True

    def end_early(self, steps: bool = False) -> None:
        """End the pass inside of its block: its backward is over, or a hook of that steps."""
        is_over = not is_in_backward()
        if steps and not (is_over or self.is_scaled):
            if self._own is not None and self._gradients.are_earlier:
                self._gradients.passes.receive_alone(self._pairs(), None)
            self.close()
        elif is_over and self._pass is not None and self._gradients.wrote(self._pairs()):
            self._pass.unscale_()
            self._skip.settle()

    def refuse_nested(self) -> None:
        """Raise inside a ``scale_loss`` of the same optimizer; abandon one that nobody can end.

        Raises:
            RuntimeError: as said.
        """
        if self._pass is not None and self._pass.is_left:
            self._pass.abandon()
        if self.is_open:
            raise RuntimeError(
                "scale_loss() blocks of one optimizer must follow each other, for both would "
                "unscale the same gradients; got one inside another. Add the losses and scale "
                "the sum, or leave the first block before the second (delay_unscale=True keeps "
                "its gradients)."
            )

    def note_thread(self) -> None:
        """This thread trains the optimizer."""
        self._thread = threading.get_ident()

    @property
    def is_here(self) -> bool:
        """False in a thread that trains its own models, while another one trains these."""
        return self._thread in (None, threading.get_ident())
