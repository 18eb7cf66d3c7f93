"""Backwards that are not for an optimizer, and may write to gradients of its parameters.

Knows one optimizer's gradients; nothing of the losses and models beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from amp_patch.common.scales import Scale
from amp_patch.gradients.foreign_gradients import ForeignGradients, Watch
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.parameter_lists import have_none, stored_grad

from .current_pass import CurrentPass
from .held_params import HeldParams
from .zeroing import Zeroing


class Trained(Protocol):
    """An optimizer that a backward is for."""

    def pairs(self) -> ParamPairs:
        """See `HeldParams.pairs`."""


class OthersBackwards:
    """What one optimizer does around a backward of others.

    Args:
        held: its parameters.
        gradients: of these.
        fused: what steps in its place; None where it steps itself.
        current: the pass that it is in.
        foreign: gets the gradients that such a backward has written.
        zeroing: is told of these backwards.
    """

    def __init__(
        self,
        held: HeldParams,
        gradients: Gradients,
        fused: FusedStep | None,
        current: CurrentPass,
        foreign: ForeignGradients,
        zeroing: Zeroing,
    ) -> None:
        self._pairs, self._gradients, self._fused = held.pairs, gradients, fused
        self._current, self._foreign, self._zeroing = current, foreign, zeroing

    def expect_foreign(self) -> None:
        """Call before a backward that is not for this optimizer, but may reach its parameters.

        That is all where its loss is not scaled, as the gradients are true then.
        """
        self._zeroing.note_other()
        fused = self._fused
        source = None if fused is None else fused.lazy.source
        if fused is not None and source is not None and source.is_half and self._current.is_here:
            fused.lazy.materialize()  # unscales half gradients, which may be written to

    def watch_foreign(self, scale: Scale) -> Watch:
        """Call before such a backward where its loss is scaled.

        Args:
            scale: what its gradients are multiplied by.

        Returns:
            What `note_foreign` needs.
        """
        self.expect_foreign()
        self._gradients.replaced.had_another_block = True
        waiting = self._fused is not None and self._fused.lazy.are_waiting
        # Nothing is watched in a thread that trains other models, nor half gradients that masters
        # have received already: nobody reads these again.
        params, masters = self._pairs() if self._current.is_here else ((), ())
        if params is not masters and (waiting or not have_none(masters)):
            params = [
                param
                for param, master in zip(params, masters, strict=True)
                if param is master or not (waiting or stored_grad(master) is not None)
            ]
        return self._foreign.watch(params)

    def note_foreign(self, watch: Watch, optimizers: Sequence[Trained], scale: Scale) -> None:
        """Call after that backward, which was for these optimizers."""
        if not self._current.is_open:  # else a block of its own unscales all
            self._foreign.note(watch, (one.pairs().model for one in optimizers), scale)

    def watch_own(self) -> Watch:
        """Return what tells `wrote_own` later which gradients of the model are new."""
        params = [*self._pairs().model, *self._gradients.elsewhere]
        return Watch.of(params, self._foreign.own_passes)

    def wrote_own(self, watch: Watch) -> bool:
        """Return whether there are new gradients since, and none of them is of an own pass."""
        is_open = self._current.is_open or watch.counted != self._foreign.own_passes
        return not is_open and not self._gradients.are_pending and bool(watch.written())
