"""What an optimizer does around the backward passes that its losses make, up to its step.

Knows one optimizer, its gradients and masters; nothing of models, levels or how scales move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.scales import Scale, is_one
from amp_patch.distributed.process_groups import StepRanks
from amp_patch.gradients.any_pass import TakenPass
from amp_patch.gradients.foreign_gradients import ForeignGradients
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import Apart, ParamPairs
from amp_patch.kernels import GradCheck
from amp_patch.kernels.graph_capture import captures
from amp_patch.optimizers.device_flag import skips_by_flag
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.parameter_lists import Tensors

from .cleared_gradients import ClearedGradients
from .clipped_gradients import ClippedGradients
from .current_pass import CurrentPass, OpenPass
from .given_gradients import skip_nonfinite
from .held_params import HeldParams, Strays
from .joined_params import JoinedParams
from .others_backwards import OthersBackwards
from .parted_params import PartedParams
from .shown_masters import ShownMasters
from .skip import Skip
from .zeroing import Zeroing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not every build of torch has it


class OptimizerBackward:
    """The gradients that one optimizer is to step with, and whether it may.

    Args:
        optimizer: held weakly.
        held: its parameters.
        fused: what steps in its place; None where it steps itself.
        skip: gets the checks whose result is pending.

    Attributes:
        held, skip: as given.
        masters, pairs: see `HeldParams`.
        gradients: of its parameters.
        clipped: the same, as they are clipped.
        cleared: the same, as a script clears them.
        current: the pass that it is in.
        foreign: those of its gradients that came of other optimizers' blocks.
        joined: those of its parameters that have come late.
        others: knows which backwards of others have written to them.
        shown: its masters, as a script gets them.
        zeroing: counts its passes, and tells where gradients are not cleared when they should be.
        unshared_scale: the scale of gradients that a ``no_sync()`` backward has left on this rank.
            The backward that shares them must have the same. None where there are none.
        decides_alone: True where there are other ranks, and no engine shares gradients with them.
        apart: knows which optimizers of one loss have no parameter in common with others; asked of
            the loss's first optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        held: HeldParams,
        fused: FusedStep | None,
        skip: Skip,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._fused = fused
        self.held = held
        self.pairs, self.masters = held.pairs, held.masters
        self.skip = skip
        lazy = None if fused is None else fused.lazy
        if self.masters is None:
            self.gradients = Gradients(lazy)
        else:
            masters = self.masters
            self.gradients = Gradients(lazy, masters.own_gradients, masters.count_data_reads)
            masters.call_when_reordered(self.gradients.passes.forget_buffers)
        self.clipped = ClippedGradients(optimizer, held, self.gradients, fused)
        self.foreign = ForeignGradients()
        self.current = CurrentPass(held, self.gradients, skip)
        self.joined = JoinedParams(held, self.gradients)
        self._parted = PartedParams(held, self.gradients, self.foreign, self.current, skip)
        self.shown = ShownMasters(
            held, self.gradients, fused, self.current, self.foreign, self.joined
        )
        self.zeroing = Zeroing(self.gradients, skip, drops_used=self.masters is not None)
        self.others = OthersBackwards(
            held, self.gradients, fused, self.current, self.foreign, self.zeroing
        )
        self.cleared = ClearedGradients(
            held, self.gradients, skip, self.current, self.foreign, self.shown, self.zeroing
        )
        self.unshared_scale: Scale | None = None
        self.decides_alone = False
        self.apart = Apart()

    @property
    def ranks(self) -> StepRanks:
        """Those to whom an overflow must be made known before the step, see `HeldParams`.

        There are none where this process steps alone, or all have the same gradients.
        """
        return self.held.ranks

    def params(self) -> Iterator[Tensor]:
        """Return the model's parameters that are stepped, here or by another rank (ZeRO)."""
        return chain(self.pairs().model, self.gradients.elsewhere)

    @property
    def device(self) -> torch.device:
        """Where the parameters are, also on a rank whose share of them is empty (ZeRO)."""
        return next(self.params()).device

    @property
    def takes_grads_as_they_are(self) -> bool:
        """True where a scale of 1 leaves nothing to do: no masters, nothing scaled."""
        return self.masters is None and self.gradients.scaled.scale is None

    @property
    def skips_by_flag(self) -> bool:
        """True where the device can skip the next step, whatever the host knows."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        fused = self._fused
        can_be = skips_by_flag(optimizer) if fused is None else fused.skips_by_flag(optimizer)
        if not can_be and (stepped := self.pairs().master):
            captures.refuse_waiting(stepped[0].device)
        return can_be

    def begin(
        self,
        pairs: ParamPairs,
        scale: Scale,
        backward_pass: OpenPass | None = None,
        is_scaled: bool = True,
        is_alone: bool = True,
    ) -> None:
        """Make room for the gradients of a loss multiplied by ``scale``.

        Args:
            pairs: whose gradients these are.
            scale: factor of the loss.
            backward_pass: is ended where unscaled gradients are asked for before its end.
            is_scaled: False where the scale is 1, and hooks of the backward may step.
            is_alone: whether the backward is for this optimizer alone.
        """
        self.shown.end()
        if self.held.joined:
            self.joined.take_over()
        if self.foreign.found:
            self.foreign.add_to()
        self.zeroing.begin(self.pairs, is_alone)
        self.gradients.set_aside(pairs, scale)
        if self.skip.outcome.value:
            self.skip.note_pass(self.gradients.are_left and not self.ranks.groups)
        self.current.open(backward_pass, pairs if is_alone else self.pairs(), scale, is_scaled)
        if self.zeroing.is_watched:
            self.shown.watch_block()
        if self.skip.is_possible and self._are_dropped():
            self.skip.forget_cleared()  # what overflowed

    def follow_strays(self, strays: Strays) -> None:
        """See `HeldParams.follow_strays`."""
        self.held.follow_strays(strays, self._parted.let_go)

    def _are_dropped(self) -> bool:
        """Return whether the user cleared all gradients, or, after a known overflow, zeroed them.

        Of other ranks' gradients this one knows nothing.
        """
        pairs = self.pairs()
        may_be_zero = self.skip.is_certain and not self.ranks.groups
        return self.gradients.are_cleared(pairs) or (may_be_zero and self.gradients.are_zero(pairs))

    def leave_scaled(self, scale: Scale) -> None:
        """End the pass with the gradients scaled, for the next backward to add to."""
        pairs = self.pairs()  # others may have come in the block
        self._end_backward(pairs)
        self.gradients.delay(pairs, scale)
        self._end_pass()

    def receive(self, pairs: ParamPairs, scale: Scale | None) -> TakenPass:
        """End the pass: take its gradients unscaled and checked, see `Passes.receive`."""
        self._end_backward(pairs)
        try:
            return self.gradients.passes.receive(pairs, scale)
        finally:
            self._end_pass()

    def receive_alone(self, pairs: ParamPairs, scale: Scale | None) -> tuple[GradCheck, Tensors]:
        """Do `receive` for a pass of this optimizer alone, see `Passes.receive_alone`."""
        self._end_backward(pairs)
        try:
            return self.gradients.passes.receive_alone(pairs, scale)
        finally:
            self._end_pass()

    def abandon(self, pairs: ParamPairs) -> None:
        """End the pass as if there had been none: gradients are as before, see `put_back`."""
        self._fail()
        self.gradients.put_back(pairs)

    def drop(self) -> None:
        """End a pass that failed after `receive` began: what was there before is lost, too."""
        self._fail()
        self.gradients.drop(self.pairs())

    def _fail(self) -> None:
        self.current.close()
        self.shown.withdraw()
        self.zeroing.abandon()
        self.pairs()  # others may have come in the block
        self.joined.drop()

    def _end_backward(self, pairs: ParamPairs) -> None:
        """The backward of the pass is over; nothing was done yet about what it wrote."""
        if self.held.joined:
            self.joined.leave_to_pass()
        if self.zeroing.is_watched:
            self.shown.end_block()
        self.zeroing.look_at_written(pairs)

    def _end_pass(self) -> None:
        self.foreign.own_passes += 1
        self.unshared_scale = None
        self.current.close()
        if self.joined.kept:
            self.joined.end_pass()

    def look_at_given(self) -> None:
        """Ask for a skip where gradients are not finite that the script may have given; may wait.

        Not where the last pass had a scale of 1, at which no overflow has a consequence.
        """
        have_overflowed = self.skip.cleared.value or self.skip.left.value
        if self.current.is_scaled and (self.decides_alone or have_overflowed):
            skip_nonfinite(self.skip, self.held, are_shared=self.decides_alone)

    def clip(
        self,
        max_norm: float,
        norm_type: float,
        stages: ProcessGroup | None,
        accept: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Clip the gradients that are stepped, unscaled ones; see `ClippedGradients.clip`."""
        device = self.device if self.ranks.groups else None
        return self.clipped.clip(max_norm, norm_type, stages, device, accept)

    def refuse_scaled(
        self,
        caller: str,
        steps: bool = False,
        goes_on: bool = False,
        among: Container[int] | None = None,
    ) -> None:
        """Raise if gradients are still scaled; else take in all that a step is to use.

        Inside of a block, after its backward, they are unscaled now: its end has nothing to do.

        Args:
            caller: what needs them unscaled, for the message.
            steps: it is the step.
            goes_on: blocks of a closure follow, which may be the last to add to them.
            among: ids of the parameters, or masters, of which those are asked for that another
                optimizer's block may have left; None: all.

        Raises:
            RuntimeError: as said.
        """
        self.shown.end(steps=steps)
        if self.current.is_open:
            self.current.end_early(steps)
        if self.current.is_open:
            raise RuntimeError(
                f"{caller} needs unscaled gradients, which there are from the end of a "
                "scale_loss() block on; got a call inside the block, and not after its "
                "backward(). Move it after the block; at a scale of 1 (O4, O5) hooks may step."
            )
        self.joined.take_over()
        if self.gradients.may_be_cleared:
            self.cleared.drop()
        are_awaited = goes_on and self.foreign.found  # by the closure, which may clear them
        if self.foreign.found and not are_awaited:
            self._refuse_foreign(caller, among)
        if self.gradients.scaled.is_assumed:  # no GradScaler was asked to unscale them
            self.gradients.scaled.forget()
        if are_awaited or self.gradients.scaled.scale is not None:
            if goes_on:
                return
            self._take_delayed(caller)
        self.shown.receive_unscaled()

    def _take_delayed(self, caller: str) -> None:
        """Give masters what was left for a further backward, where nothing ever multiplies it.

        Not where a scale may move that is 1 now, which an overflow has to hear of; nor what other
        ranks have no part in.
        """
        scale = self.gradients.scaled.scale
        is_shared = self.unshared_scale is None
        if scale is None or not (is_one(scale) and is_shared and not self.current.is_scaled):
            raise RuntimeError(
                f"{caller} needs unscaled gradients; the last scale_loss(..., "
                "delay_unscale=True) or one under no_sync(), or a GradScaler's scale(), left them "
                "scaled. Leave both out in the last scale_loss() before it, or call "
                "scaler.unscale_(optimizer), or clear them with optimizer.zero_grad()."
            )
        # Half gradients stay as they are: another optimizer may have yet to take in the same ones.
        passes = self.gradients.passes
        passes.finish(passes.receive(self.pairs(), scale))

    def _refuse_foreign(self, caller: str, among: Container[int] | None) -> None:
        pairs = self.pairs()
        self.foreign.drop_given(pairs)
        if among is not None:
            rows = zip(*pairs, strict=True)
            pairs = pairs.select([any(id(one) in among for one in row) for row in rows])
        self.foreign.refuse(caller, pairs.model)

    def scaled_params(self) -> Sequence[Tensor]:
        """Return the parameters whose gradients wait for a further backward of a scaled loss."""
        scale = self.gradients.scaled.scale
        if scale is None or is_one(scale):
            return ()
        pairs = self.pairs()
        return pairs.model if self.gradients.are_delayed(pairs) else ()

    def follow_hooks(self) -> None:
        """Hooks of a step were called: what they gave half parameters, or cleared, is stepped."""
        if not self.current.is_open:
            if self.gradients.may_be_cleared:
                self.cleared.drop()
            self.shown.receive_unscaled()

    def follow_foreign_step(self) -> None:
        """A step that is not torch's ends, which may have cleared gradients.

        Warn where it wrote to half gradients, as K-FAC does.
        """
        self.gradients.unused.tell(self.pairs())
        self.gradients.outside.follow_cleared_by_step(self.pairs())

    def end_step(self, is_made: bool) -> None:
        """The gradients were used up, by a step that was made or skipped."""
        self.current.note_thread()
        self.zeroing.end_step()
        self.cleared.forget()
        # a fused step reads half gradients as the backward left them, scaled
        self.gradients.used_at_masters.note_step(is_made and self._fused is None)
        self.shown.offer_stepped()
