"""The gradients of one optimizer, from the backward that writes them to the step that uses them.

Knows pairs of parameters and masters, no optimizer and no loss scaler. How a backward's gradients
are taken in is `passes`' subject, gradients that stay scaled are `scaled_gradients`'.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, compress

from torch import Tensor

from amp_patch.common.scales import Scale, is_one
from amp_patch.kernels.default_device import without_default_device
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.parameter_lists import (
    STORED_GRAD,
    are_same,
    clear_grads,
    have_none,
    look_up,
    stored_grad,
)

from .any_values import are_any
from .earlier_gradients import EarlierGradients
from .outside_passes import OutsidePasses
from .param_pairs import ParamPairs
from .parted_gradients import PartedGradients
from .passes import Passes
from .received_gradients import ReceivedGradients
from .replaced_gradients import ReplacedGradients
from .rounded_gradients import round_into_halves
from .scaled_gradients import ScaledGradients, bring_to
from .unused_writes import UnusedWrites
from .used_at_masters import UsedAtMasters
from .used_gradients import UsedGradients


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``drop_cleared`` and ``set_aside`` come before a backward. After it `passes` take in what it
    wrote; or ``delay`` leaves it scaled for the next backward to add to; or ``put_back`` does as if
    there had been no such backward.

    Args:
        lazy: keeps the masters' gradients until somebody reads them; None: they are stored at once.
        own: tells which gradients of masters no script has written; None: there are no masters.
        count_data_reads: see `ReceivedGradients`.

    Attributes:
        scaled: those that are still multiplied by a loss scale.
        passes: take in what backwards wrote: unscale it, add what was there.
        used_at_masters: shows masters those that a step has used, and left to be added to.
        unused: tells of writes to half gradients whose masters have received theirs.
        outside: says what backwards outside of blocks leave, and find to add to.
        parted: lets go of parameters that leave the optimizer.
        replaced: tells what a script has put in the place of gradients that masters have received.
        elsewhere: half parameters of which other ranks step the masters (ZeRO). Their gradients are
            cleared before the next pass, which would share them among the ranks once more. Where
            the others' wait scaled, theirs do, too.
    """

    def __init__(
        self,
        lazy: LazyGradients | None = None,
        own: OwnGradients | None = None,
        count_data_reads: Callable[[], int] = lambda: 0,
    ) -> None:
        self._lazy = lazy
        self._own = OwnGradients() if own is None else own
        self.scaled = ScaledGradients()
        self._aside = EarlierGradients()
        self._is_first = True  # no pass has begun since the last step or clearing
        self._received = ReceivedGradients(lazy, count_data_reads)
        self._used = UsedGradients()
        self.used_at_masters = UsedAtMasters(self._used, self._own)
        self.unused = UnusedWrites(self._received, lazy)
        self.outside = OutsidePasses(self._received, self._used, self._own)
        self.parted = PartedGradients(lazy, self.scaled, self._aside, self._received, self._used)
        self.replaced = ReplacedGradients(lazy, self._received, self._used)
        self.passes = Passes(
            lazy, self.scaled, self._aside, self._received, self._used, self.replaced
        )
        self.elsewhere: list[Tensor] = []

    @property
    def are_pending(self) -> bool:
        """True where a scaled loss has left gradients that no step has used yet."""
        return self.scaled.scale is not None or bool(self._received)

    @property
    def may_be_cleared(self) -> bool:
        """True where gradients that no step has used yet are not as a backward left them."""
        received = self._received
        return self.scaled.scale is not None or not received.are_untouched() or received.are_more()

    @property
    def are_left(self) -> bool:
        """True in the first pass after a step whose gradients were not cleared."""
        return bool(self._aside) and not self.are_pending

    @property
    def are_earlier(self) -> bool:
        """True in a pass that adds to what an earlier one has left."""
        return bool(self._aside) or self.scaled.scale is not None

    @property
    def _are_waiting(self) -> bool:
        """True while the masters' gradients wait until somebody reads them."""
        return self._lazy is not None and self._lazy.are_waiting

    def adopt(self, pairs: ParamPairs, scale: Scale) -> None:
        """Take over gradients that parameters had when they came to the optimizer.

        A block of another optimizer, say, has reached a layer that no optimizer held, which is
        added to this one then: its gradients are multiplied by that block's scale. They are taken
        in as those of a pass are. Where one is not finite, all go, as after a skipped step.

        Args:
            pairs: those parameters. A master that was made for one has got a copy of its gradient,
                which is dropped for the unscaled one.
            scale: what the gradients are multiplied by; 1 where they are true.
        """
        is_true = is_one(scale)
        have_one = [stored_grad(param) is not None for param in pairs.model]
        if self._lazy is not None:
            self._lazy.materialize()
        # at a scale also the copies of gradients that a script has cleared since
        copied = pairs.select(have_one) if is_true else pairs
        clear_grads([master for _, master in copied.halves()])
        pairs = pairs.select(have_one)
        if not pairs.model:
            return
        if self.scaled.scale is not None:  # the next block unscales them with the others
            grads = [grad for grad in map(stored_grad, pairs.model) if grad is not None]
            bring_to(self.scaled.scale, scale, grads)
            return
        is_first = not self._received
        taken = self.passes.receive(pairs, None if is_true else scale)
        if taken.check.overflow:
            clear_grads(pairs.model)
            self._clear_masters(pairs.master)
            return
        self.passes.round_into_halves(taken)
        self.passes.finish(taken)
        self.outside.was_last |= is_true and is_first

    def are_delayed(self, pairs: ParamPairs) -> bool:
        """True while gradients are still multiplied by a loss scale."""
        written = chain(pairs.model, self.elsewhere)
        if self.scaled.scale is not None and all(param.grad is None for param in written):
            # The user dropped them (model.zero_grad(), p.grad = None) and all that came before.
            self._clear_masters(self._without_given(master for _, master in pairs.halves()))
            self.forget()
        return self.scaled.scale is not None

    def forget(self) -> None:
        """The gradients were cleared or stepped: none is scaled or set aside any more."""
        self.replaced.had_another_block, self._is_first = False, True
        if self.scaled.scale is not None:
            self.scaled.forget()
        if self._received or self._aside:  # to save time: `zero_grad` finds neither after a step
            self._aside.clear()
            self._received.end()
            self.outside.end()
        if self._lazy is not None:
            self._lazy.stored = ()
        self._own.forget()

    def are_used(self, pairs: ParamPairs) -> bool:
        """Return whether only gradients are there that a step has used; waits for the device.

        In a capture, which reads no numbers, nobody is told of any.
        """
        used = set(map(id, self._used.alive()))
        found = [grad for param in pairs.model if id(grad := param.grad) in used]
        left = [grad for grad in found if grad is not None and not captures.are_made(grad.device)]
        if self._are_waiting or not left:
            return False
        # a float32 parameter is its own master, and keeps its gradient
        if any(_has_grad(master) for _, master in pairs.halves()):
            return False
        return any(are_any(left))

    def are_cleared(self, pairs: ParamPairs) -> bool:
        """Return whether there is no gradient, neither at a parameter or a master nor aside."""
        return not self._are_waiting and not self._aside and not any(map(_has_grad, chain(*pairs)))

    def are_zero(self, pairs: ParamPairs) -> bool:
        """Return whether those that wait aside are 0, and so those of masters; waits for a device.

        Nothing but 0 is what a script leaves that clears in place.
        """
        found = [*self._aside.grads, *map(stored_grad, pairs.master)]
        return not self._are_waiting and not any(are_any(found))

    def drop(self, pairs: ParamPairs) -> None:
        """Clear all gradients: those of parameters and masters, set aside or waiting."""
        if self._lazy is not None:
            self._lazy.drop()
        for tensor in chain(*pairs):
            tensor.grad = None
        self.forget()

    def clear(self, pairs: ParamPairs, cleared: set[int]) -> None:
        """Clear those of some parameters that are aside, at masters, or waiting.

        Args:
            pairs: of the optimizer.
            cleared: ids of parameters.
        """
        self._aside.drop(cleared)
        self._clear_masters(master for param, master in pairs.halves() if id(param) in cleared)

    def clear_given(self, pairs: ParamPairs, cleared: set[int]) -> None:
        """Clear what masters of some parameters have that no pass has given them, but a script.

        Args:
            pairs: of the optimizer.
            cleared: ids of parameters.
        """
        given = cleared.difference(map(id, self._received.params()))
        clear_grads([master for param, master in pairs.halves() if id(param) in given])

    def are_as_stepped(self) -> bool:
        """Return whether those that the last step has used are there, and nobody wrote to them."""
        return not self._used.has_older and self._received.are_as_stepped()

    def forget_used(self) -> None:
        """All gradients are gone: those that a step has used are kept alive no more.

        Where a fused step has used them, they are known as long as the script keeps them: given
        again, they would be stepped as they are, multiplied by the scale.
        """
        if self._lazy is None:
            self._used.begin(())
        else:
            self._used.weaken()
        self._received.stepped = []

    def clear_elsewhere(self) -> None:
        """Clear those of parameters whose masters other ranks step."""
        if self.elsewhere:
            clear_grads(self.elsewhere)

    def _clear_masters(self, masters: Iterable[Tensor]) -> None:
        masters = [*masters]
        if masters and self._lazy is not None and self._lazy.are_waiting:
            self._lazy.discard(masters)
        clear_grads(masters)

    def _without_given(self, masters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of masters that have no gradient that a script has given them.

        What is cleared by hand is found later: a script may have given masters others since.
        """
        stored, found = self._received.stored(), []
        for master in masters:
            grad = stored_grad(master)
            if grad is None or id(grad) in stored or self._own.has_stored(master):
                found.append(master)
        return found

    def set_aside(self, pairs: ParamPairs, scale: Scale) -> None:
        """Make room for a backward of a loss multiplied by ``scale``.

        Unscaled gradients wait aside, and half gradients that a master was given, for the case that
        the backward fails; masters are given what a backward outside of ``scale_loss`` left, too.
        Scaled ones stay for the backward to add to, brought to the new scale if
        it moved.

        Args:
            pairs: whose gradients these are.
            scale: factor of the loss.
        """
        if self.scaled.scale is not None:
            elsewhere = self.elsewhere
            self.scaled.bring_to(scale, [*pairs.model, *elsewhere] if elsewhere else pairs.model)
            return
        self.clear_elsewhere()
        self._aside.clear()
        is_empty = have_none(pairs.model)
        if self._is_first:
            self._aside.are_scripts, self._is_first = not is_empty, False
        if not is_empty:
            if self.take_unscaled:
                self.receive_unscaled(pairs)
            if self._aside.take(pairs.model) and self._lazy is not None:
                self._lazy.materialize()  # while it is what a view of others' memory was
        self.outside.was_last = False

    def wrote(self, pairs: ParamPairs) -> bool:
        """Return whether a backward has written gradients since `set_aside`."""
        if self.scaled.scale is not None:
            return self.scaled.were_written()
        return any(map(_has_grad, pairs.model))

    def delay(self, pairs: ParamPairs, scale: Scale) -> None:
        """Leave what the backward wrote scaled."""
        written = chain(pairs.model, self.elsewhere)
        if self.scaled.scale is None and not any(map(_has_grad, written)):
            self._aside.give_back()  # it reached none of them
        else:
            self.scaled.go_on(scale)

    def put_back(self, pairs: ParamPairs) -> None:
        """The backward failed: drop what it wrote, restore what was there.

        What it added to scaled gradients cannot be taken away again: where it wrote to any, all of
        them go. So do those of a flat parameter of FSDP1, which the backward has left gathered.
        """
        if self.scaled.scale is not None and not self.scaled.were_written():
            return
        self.scaled.forget()
        for param in pairs.model:
            param.grad = None
        self._aside.put_back()

    @without_default_device
    def follow_clipping(self, pairs: ParamPairs) -> None:
        """The gradients of these masters were clipped: those of half parameters are, too.

        Not where a fused step reads these: what masters were shown is then as if written to.
        """
        if self._lazy is not None:
            for master in pairs.master if self.outside.was_last else ():
                self._own.note_written(master)
        elif self._received:
            if replaced := round_into_halves(pairs):
                self._used.add(map(weakref.ref, replaced))
            self._received.note_again(pairs.model)
            self.replaced.note_clipped(pairs.master)

    @property
    def take_unscaled(self) -> bool:
        """True where a backward outside of ``scale_loss`` may have left what masters are to get."""
        return self.scaled.scale is None and (self.outside.was_last or not self._received)

    def receive_unscaled(self, pairs: ParamPairs) -> None:
        """Give masters what a backward outside of ``scale_loss`` left at their parameters.

        It is added to what the backward wrote to masters themselves. Call it where `take_unscaled`.
        """
        if are_same(*pairs) or self._are_waiting:
            return
        were_shown = bool(self._received)
        left = self.outside.left(pairs)
        if left is not None:
            used = self._used.unwritten()
            grads = set(map(id, look_up(STORED_GRAD, pairs.model))) if used else ()
            taken = self.passes.receive(left, None)
            self.passes.finish(taken, [one for one in used if id(one) in grads])
            self.outside.was_last = True
            if were_shown:
                self.outside.note_shown(pairs)

    def give_back(self, pairs: ParamPairs) -> None:
        """A backward outside of ``scale_loss`` comes: half parameters get what it is to add to."""
        self._follow_zeroed(pairs)
        if not self.are_pending and not have_none(pairs.master):
            self.outside.give_back_written(pairs)
        if not self._are_waiting:
            self.outside.give_back_received(pairs)

    def _follow_zeroed(self, pairs: ParamPairs) -> None:
        """Take what a block has left for cleared where the script has zeroed it in place.

        What a backward outside adds to it is new, though the tensors are those of the block.
        """
        if self.are_pending and not self.outside.was_last and self.may_be_cleared:
            self.drop_cleared(pairs)
        if self.are_pending or self._used.are_left or have_none(pairs.model):
            return
        if self.are_as_stepped():  # as nearly always: no device is to be waited for
            return
        used = set(map(id, self._used.alive()))
        found = [grad for param in pairs.model if id(grad := stored_grad(param)) in used]
        left = [grad for grad in found if grad is not None]
        self._used.note_versions(compress(left, map(operator.not_, are_any(left))))

    def drop_cleared(
        self, pairs: ParamPairs, by_value: bool = False, among: set[int] | None = None
    ) -> None:
        """Where the user cleared a half gradient, drop what its master was given of it, too.

        And where the user has put another in its place, give the master that one.

        Args:
            pairs: of the optimizer.
            by_value: see `ReceivedGradients.changes`.
            among: ids of the parameters that are looked at, which a call clears now, with what a
                script has given their masters; None: all.
        """
        if self.are_delayed(pairs):
            return
        if self.outside.was_last:
            self.receive_unscaled(pairs)
        own = pairs if among is None else pairs.select([id(one) in among for one in pairs.model])
        changes = self._received.changes(own, by_value)
        (params, masters), given = changes.cleared, ParamPairs([], [])
        if among is None:
            given = self.replaced.found(pairs, changes, self._without_given(pairs.master))
            masters = [*self._without_given(masters), *given.master]
        self.unused.tell_of_changes(changes, given.model)
        self._clear_masters(masters)
        # Where all half gradients are cleared nothing counts as received any more. Float32 ones, of
        # a batch norm, are cleared at the parameters themselves, and count where all are such.
        halves = [param for param, _ in pairs.halves()]
        self._received.keep(halves or pairs.model, set(map(id, chain(params, given.model))))
        if given.model:
            self._receive_given(given)

    def take_given(self, pairs: ParamPairs) -> None:
        """Give masters what a script has put in the place of half gradients they have received.

        Before it writes to those of masters, which it is about to read.
        """
        if self.scaled.scale is not None or self.outside.was_last:
            return
        changes = self._received.changes(pairs)
        given = self.replaced.found(pairs, changes, self._without_given(pairs.master))
        if given.model:
            self._clear_masters(given.master)
            self._received.keep(self._received.params(), set(map(id, given.model)))
            self._receive_given(given)

    def _receive_given(self, given: ParamPairs) -> None:
        is_first = not self._received
        self.passes.finish(self.passes.receive(given, None))
        self.outside.was_last = is_first  # what a plain backward adds to is no block's


def _has_grad(param: Tensor) -> bool:
    return stored_grad(param) is not None
