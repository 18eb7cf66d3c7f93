"""What follows of it that a user clears gradients: of an optimizer's own, or of some of a model's.

Masters are rid of theirs, and what waits for a later block or a skipped step is forgotten.
"""

from __future__ import annotations

from amp_patch.gradients.foreign_gradients import ForeignGradients
from amp_patch.gradients.gradients import Gradients
from amp_patch.weights.parameter_lists import have_none

from .current_pass import CurrentPass
from .held_params import HeldParams
from .shown_masters import ShownMasters
from .skip import Skip
from .zeroing import Zeroing


class ClearedGradients:
    """Follows what is cleared of the gradients of one optimizer's parameters.

    Args:
        held: these parameters.
        gradients: theirs.
        skip: whether the next step is skipped.
        current: the pass that the optimizer is in.
        foreign: gradients that came of other optimizers' blocks.
        shown: its masters, as a script gets them.
        zeroing: is told when gradients are cleared.
    """

    def __init__(
        self,
        held: HeldParams,
        gradients: Gradients,
        skip: Skip,
        current: CurrentPass,
        foreign: ForeignGradients,
        shown: ShownMasters,
        zeroing: Zeroing,
    ) -> None:
        self._pairs, self._gradients, self._skip = held.pairs, gradients, skip
        self._current, self._foreign = current, foreign
        self._shown, self._zeroing = shown, zeroing
        self._has_masters = held.masters is not None

    def note(self) -> None:
        """The user is about to clear the gradients."""
        current = self._current
        if not current.is_open:
            current.note_thread()
        self._shown.end()
        self._zeroing.note_cleared(not current.is_open or self._gradients.wrote(self._pairs()))

    def note_by_model(self, cleared: set[int]) -> None:
        """The user is about to clear the gradients of these parameters, by their ids."""
        pairs = self._pairs()
        own = set(map(id, pairs.model))
        if cleared.isdisjoint(own):
            return
        self.note()
        is_whole = own <= cleared and not self._current.is_open
        if is_whole:
            self._skip.note_cleared()
        self._foreign.drop(cleared)
        # what waits for a further block is at no master yet; else `follow` comes after it
        if self._current.is_open or self._gradients.scaled.scale is not None:
            self._gradients.clear(pairs, cleared)
            if is_whole:
                self._gradients.scaled.forget()  # zeros have no scale
        elif not have_none(pairs.master):
            self._gradients.clear_given(pairs, cleared)

    def follow(self, cleared: set[int]) -> None:
        """A model has cleared gradients: masters are rid of theirs before others are given.

        What was written to gradients that are left is told of where they are used.

        Args:
            cleared: ids of the model's parameters.
        """
        self._shown.withdraw()
        if self._current.is_open:
            return
        if not self._gradients.are_pending:
            if self._has_masters and have_none(self._pairs().model):
                self._gradients.forget_used()
            else:
                self._shown.offer_stepped()  # of other parameters
            return
        if not self._gradients.may_be_cleared:
            return
        pairs = self._pairs()
        if not cleared.isdisjoint(map(id, pairs.model)):
            self._gradients.drop_cleared(pairs, by_value=self._skip.is_certain, among=cleared)
            if self._gradients.are_cleared(pairs):
                self.forget()

    def drop(self) -> None:
        """Drop masters' gradients whose half gradients the user has cleared, or replaced.

        Call it where ``gradients.may_be_cleared``, and after an overflow: the skipped step uses no
        gradient, so one that was left at a master would be added to for good.
        """
        self._shown.withdraw()
        self._gradients.drop_cleared(self._pairs(), by_value=self._skip.is_certain)

    def forget(self) -> None:
        """The gradients were stepped or cleared; nothing is known of the next ones."""
        self._foreign.found.clear()
        self._gradients.forget()
