"""Masters as a script gets them before the step that uses them: their values and their gradients.

A script reads and writes those of ``amp.master_params(optimizer)`` and ``optimizer.param_groups``
where plain PyTorch would have it read and write the model's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.warn_once import warn_once
from amp_patch.gradients.foreign_gradients import ForeignGradients
from amp_patch.gradients.gradient_offer import GradientOffer
from amp_patch.gradients.gradients import Gradients
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.parameter_lists import are_same, have_none, stored_grad, stored_grads

from .current_pass import CurrentPass
from .held_params import HeldParams
from .joined_params import JoinedParams


class _Reading(threading.local):
    """Whether what gets masters in this thread reads them only, see `only_read`."""

    is_on = False

    @contextlib.contextmanager
    def only(self) -> Iterator[None]:
        """Who gets masters in this block writes to none."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before


_reading = _Reading()
#: For torch's functions that clip: a write to a half parameter that follows is no second one.
only_read = _reading.only


_EARLY = (
    "optimizers of amp.initialize() step fp32 masters where a model is stored in half, and these "
    "get their gradients with the end of the scale_loss() block; got {} inside of the block, after "
    "its backward(). Use the gradients of model.parameters() there, which are multiplied by "
    "amp.loss_scale(), or those of amp.master_params(optimizer) after the block."
)


class ShownMasters:
    """Gives the masters of one optimizer their gradients when a script may read them.

    To do so in each step would take time that most scripts have no use for, so masters are offered
    to ask for them, see `GradientOffer`.

    Args:
        held: the parameters of the optimizer.
        gradients: of these.
        fused: what steps in its place; None where it steps itself.
        current: the pass that it is in.
        foreign: gradients that came of other optimizers' blocks.
        joined: parameters that have come late.
    """

    def __init__(
        self,
        held: HeldParams,
        gradients: Gradients,
        fused: FusedStep | None,
        current: CurrentPass,
        foreign: ForeignGradients,
        joined: JoinedParams,
    ) -> None:
        self._held, self._pairs, self._masters = held, held.pairs, held.masters
        self._gradients, self._fused = gradients, fused
        self._current, self._foreign, self._joined = current, foreign, joined
        self._offer = GradientOffer(self)
        # whether masters waited to be read when the backward began that is outside of a block
        self._waited = False
        # ids of the masters' own, from `watch_block` on; None: no block is watched
        self._known: set[int] | None = None
        # whether they show scaled gradients, as those of a GradScaler's loss are until `unscale_`
        self._shows_scaled = False

    def show(self) -> None:
        """The user gets the masters, to read, write and differentiate by until the next step.

        In a block, after its backward, they get their gradients now. Not for another thread, which
        asks while this one may be in the backward: it reads values, for a log or an average.
        """
        current, used = self._current, self._gradients.used_at_masters
        if not current.is_open:
            self._joined.take_over()
        if not current.is_open or is_in_backward() or current.is_here:
            if current.is_open and self._masters is not None:
                current.end_early()
            if used.wait_to_be_read and not self._gradients.are_pending:
                self._offer.withdraw()  # most often it is for their values
            else:
                self._give_gradients()
        if self._masters is not None and not _reading.is_on:
            self._masters.expose()

    def watch_block(self) -> None:
        """A block begins, at whose end masters get their gradients: who reads them before is told.

        As merging wrappers (PCGrad) do, which would take the lack of one for a gradient of 0.
        """
        if self._masters is not None:
            self._known = set(map(id, stored_grads(self._pairs().master)))
            self._offer.make(*self._held.firsts)

    def show_gradients(self) -> None:
        """See `GradientOffer`: somebody asks for a master's gradient."""
        if not self._current.is_open:
            self._give_gradients()
            return
        is_early = self._is_early()
        self._offer.withdraw()
        if is_early:
            warn_once(_EARLY.format("one's .grad read or cleared"))

    def refuse_assignment(self) -> None:
        """Raise in a block, whose end would add the assigned gradient to the backward's.

        Raises:
            RuntimeError: as said.
        """
        if self._is_early():
            raise RuntimeError(_EARLY.format("a gradient assigned to one"))

    def look_at(self, master: Tensor) -> None:
        """See `GradientOffer`: a script asks for a gradient that was shown after a step."""
        self._gradients.used_at_masters.look_at(master)

    def end_block(self) -> None:
        """The backward of a block is over, and what it wrote is taken in.

        Raises:
            RuntimeError: see `refuse_assignment`.
        """
        self._offer.withdraw()
        known, self._known = self._known, None
        if known is None or self._masters is None:
            return
        has_own = self._masters.own_gradients.has  # a backward may come to masters themselves
        for param, master in self._pairs().halves():
            grad = stored_grad(master)
            is_new = grad is not None and id(grad) not in known
            if is_new and stored_grad(param) is not None and not has_own(master):
                raise RuntimeError(_EARLY.format("a gradient assigned to one"))

    def _is_early(self) -> bool:
        """Return whether this thread is in a block, after its backward."""
        current = self._current
        is_behind_backward = current.is_open and current.is_here and not is_in_backward()
        return is_behind_backward and self._gradients.wrote(self._pairs())

    def _give_gradients(self) -> None:
        """The masters' gradients may be read before the next step, and a backward may follow.

        After a step they are what it has used, until these are cleared.
        """
        if self._shows_scaled:
            self._offer.withdraw()
            self._gradients.scaled.copy_to_masters(self._pairs())
        elif self._gradients.used_at_masters.copied:
            self._offer.withdraw()
        else:
            self._give_unscaled()

    def _give_unscaled(self) -> None:
        used = self._gradients.used_at_masters
        if self._fused is None and self._gradients.may_be_cleared:
            self._gradients.take_given(self._pairs())
        self.receive_unscaled()
        if self._fused is not None:
            # A backward adds to what is stored; what waits would come last in the sum.
            self._fused.lazy.materialize()
        if self._masters is not None:
            may_be_written = self._fused is None and not _reading.is_on
            if may_be_written and self._gradients.are_pending:
                self._gradients.replaced.note_read(self._pairs().master)
            self._gradients.outside.note_shown(self._pairs())
            if (used.are_left or used.wait_to_be_read) and not self._gradients.are_pending:
                pairs = self._pairs()
                used.copy_to_masters(pairs)
                if used.copied and used.are_left:  # a backward adds to them
                    self._offer.watch(*pairs)

    def show_scaled(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which masters have what waits scaled, see `ScaledGradients.shown`."""
        scaled = self._gradients.scaled
        self._take_scaled_back()
        if scaled.scale is None or self._current.is_open:
            return contextlib.nullcontext()
        return scaled.shown(self._pairs())

    def receive_unscaled(self) -> None:
        """Give masters what a backward outside of ``scale_loss`` left at their parameters.

        Not where that of another optimizer's block has left some: they are scaled.
        """
        self._offer.withdraw()
        if self._masters is None or self._current.is_open or not self._gradients.take_unscaled:
            return
        if not self._foreign.are_left():
            self._gradients.receive_unscaled(self._pairs())

    def give_back(self) -> None:
        """A backward outside of ``scale_loss`` begins; see `Gradients.give_back`."""
        if self._current.is_open:
            return
        if self._held.joined:  # of which new masters have copies
            self._joined.take_over()
        used = self._gradients.used_at_masters
        self._waited = used.wait_to_be_read
        used.follow()
        self._gradients.give_back(self._pairs())

    def offer(self) -> None:
        """A backward outside of ``scale_loss`` has ended: a script may read what masters get."""
        if not self._current.is_open and self._gradients.take_unscaled:
            pairs = self._pairs()
            if not are_same(*pairs) and not have_none(pairs.model):
                self._offer.make(*pairs)
        if self._waited and self._gradients.are_as_stepped():  # it was of another model
            self._gradients.used_at_masters.note_step(True)
        self._waited = False

    def offer_stepped(self) -> None:
        """A script may read what a step has used, and clear it before the next backward."""
        if self._masters is None:
            return
        if self._gradients.used_at_masters.are_left:
            pairs = self._pairs()
            if not have_none(pairs.model):
                self._offer.make(*pairs)
        elif self._gradients.used_at_masters.wait_to_be_read:
            # A script that reads gradients reads those of all masters: it is enough that the first
            # of each group asks, for then all get theirs.
            self._offer.make(*self._held.firsts)

    def offer_scaled(self) -> None:
        """A script may read and write what the backward of a GradScaler's loss has left, scaled.

        As under torch.amp, until these are unscaled or a further backward adds to them.
        """
        if self._masters is not None and self._gradients.scaled.scale is not None:
            self._shows_scaled = True
            self._offer.make(*self._held.firsts)  # see `offer_stepped`

    def _take_scaled_back(self) -> None:
        if self._shows_scaled:
            self._shows_scaled = False
            self._gradients.scaled.follow()

    def withdraw(self) -> None:
        """No master asks any more."""
        self._take_scaled_back()
        self._offer.withdraw()
        self._known = None

    def end(self, *, steps: bool = False) -> None:
        """Masters have gradients of their own from here on; used ones are as a script left them.

        Args:
            steps: see `UsedAtMasters.follow`.
        """
        self._take_scaled_back()
        self._offer.withdraw()
        self._gradients.used_at_masters.follow(steps=steps)
