"""Backward passes outside of ``scale_loss``: what they leave, and what they find to add to.

Their gradients are true, and at the half parameters; masters are given them before a step, or when
a script reads theirs. A further backward then finds none to add to, so it is given them back.
"""

from __future__ import annotations

from amp_patch.kernels.getters import GRAD
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.parameter_lists import look_up, store_grad, stored_grad

from .param_pairs import ParamPairs
from .received_gradients import ReceivedGradients
from .used_at_masters import give_rounded, have_other_numbers
from .used_gradients import UsedGradients


class OutsidePasses:
    """Says what of a backward outside of a block masters are to be given, and takes it back.

    Args:
        received: what masters have received since the last step.
        used: half gradients that the step is to use, or has used.
        own: tells which gradients of masters no script has written.

    Attributes:
        was_last: whether it is from one that masters have received last.
    """

    def __init__(
        self,
        received: ReceivedGradients,
        used: UsedGradients,
        own: OwnGradients,
    ) -> None:
        self._received, self._used, self._own = received, used, own
        self.was_last = False

    def end(self) -> None:
        """The gradients were stepped or cleared; they have no scale: a backward may add to them."""
        if self.was_last:
            self._used.note_versions()
            self.was_last = False

    def left(self, pairs: ParamPairs) -> ParamPairs | None:
        """Return the parameters of which masters are to receive what was left; None: of none.

        Not of those whose gradients a step has used, until these are written to; and of none where
        a script has given masters gradients, which are stepped alone.

        Args:
            pairs: of the optimizer.
        """
        is_changed = bool(self._received) and not self._received.are_untouched()
        if is_changed and not self._take_back(pairs):
            return None
        not_new = {id(grad) for grad in (*self._used.unwritten(), None)}
        given = pairs.select(
            [
                param is not master and id(stored_grad(param)) not in not_new
                for param, master in zip(*pairs, strict=True)
            ]
        )
        earlier = [master for master in given.master if stored_grad(master) is not None]
        return given if given.model and all(map(self._own.has, earlier)) else None

    def _take_back(self, pairs: ParamPairs) -> bool:
        """Take from masters what they were given to be shown, if a backward outside came later.

        It has added to the half gradients. Where a script has written to the masters', these are
        what it wants stepped; the step tells of what was written to half ones then.

        Returns:
            Whether it did.
        """
        rows = [row for row in pairs.halves() if stored_grad(row[1]) is not None]
        if not all(self._own.has(master) for _, master in rows):
            return False
        for param, master in rows:
            rest = None if stored_grad(param) is None else self._own.sums.get(id(master))
            store_grad(master, None if rest is None else rest.clone())
            self._own.note(master)
        self._forget_received()
        return True

    def _forget_received(self) -> None:
        self._used.drop(look_up(GRAD, self._received.params()))
        self._received.clear()

    def note_shown(self, pairs: ParamPairs) -> None:
        """A script gets the masters before their step: a further backward outside may follow.

        What it wrote to a gradient that was shown before stays its own.
        """
        if self.was_last:
            for master in pairs.master:
                if not self._own.has_stored(master):
                    self._own.note(master)

    def give_back_written(self, pairs: ParamPairs) -> None:
        """Give half parameters, rounded, what a script wrote to their masters' gradients.

        The backward that comes adds to it, and masters are given the sum. Gradients of masters that
        nobody has written to are left, for `left` replaces them after the backward.
        """
        for param, master in pairs.halves():
            if stored_grad(master) is not None and not self._own.has(master):
                give_rounded(param, master)

    def give_back_received(self, pairs: ParamPairs) -> None:
        """Do the same where masters have received what an earlier backward outside has left."""
        if not self.was_last:
            return
        are_received = self._are_received(pairs)
        self.give_back_written(pairs.select([not is_received for is_received in are_received]))
        shown = pairs.select(are_received)
        if not self._are_written(shown):
            return
        self._clear_as_halves(shown)
        self._forget_received()
        for param, master in zip(*shown, strict=True):
            give_rounded(param, master)
        self._own.forget()

    def _clear_as_halves(self, shown: ParamPairs) -> None:
        """Clear what masters have received of half gradients that the script has cleared since.

        Not what it has given them.
        """
        if self._received.are_untouched():
            return
        stored, cleared = self._received.stored(), self._received.changes(shown).cleared
        for master in cleared.master:
            if id(stored_grad(master)) in stored or self._own.has_stored(master):
                store_grad(master, None)

    def _are_written(self, shown: ParamPairs) -> bool:
        """Return whether a script wrote to what masters have received; may wait for a device."""
        if not all(map(self._own.has, shown.master)):
            return True
        if not self._received.are_untouched():  # the half ones are what is told of
            return False
        alone = [
            (param, master)
            for param, master in zip(*shown, strict=True)
            if id(master) not in self._own.sums
        ]
        return bool(have_other_numbers(alone))  # ``grad.data`` moves no version

    def follow_cleared_by_step(self, pairs: ParamPairs) -> None:
        """Clear those of half parameters whose masters' the step has cleared itself.

        Not after a block, of which the next backward takes none up.
        """
        if self.was_last:
            received = pairs.select(self._are_received(pairs))
            for param, master in zip(*received, strict=True):
                if stored_grad(master) is None:
                    store_grad(param, None)

    def _are_received(self, pairs: ParamPairs) -> list[bool]:
        received = set(map(id, self._received.params()))
        return [id(param) in received for param in pairs.model]
