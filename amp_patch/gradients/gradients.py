"""The gradients of one optimizer, from the backward that writes them to the step that uses them.

Knows pairs of parameters and masters, no optimizer and no loss scaler. How a list of gradients is
unscaled is `gradient_buffers`' subject, gradients that stay scaled are `scaled_gradients`'.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from amp_patch import kernels
from amp_patch.distributed.shards import local, place_gradients
from amp_patch.kernels import GradCheck
from amp_patch.kernels.default_device import without_default_device
from amp_patch.warn_once import warn
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.own_gradients import OwnGradients
from amp_patch.weights.parameter_lists import (
    Tensors,
    are_complete,
    are_same,
    clear_grads,
    have_none,
    look_up,
    store_grad,
    stored_grad,
)

from .any_pass import AnyPass, Written
from .earlier_gradients import EarlierGradients
from .gradient_buffers import GradientBuffers
from .half_gradients import HalfGradients, LargeInHalf
from .param_pairs import ParamPairs
from .received_gradients import ReceivedGradients
from .scaled_gradients import ScaledGradients
from .shown_gradients import show
from .stepped_gradients import SteppedGradients, give_rounded
from .used_gradients import UsedGradients
from .usual_pass import UsualPass


class Gradients:
    """The gradients of one optimizer around one or more backward passes.

    ``drop_cleared`` and ``set_aside`` come before a backward. After it comes ``receive`` (unscale
    what it wrote, add what was there), ``show`` (let half gradients hold that, too) and ``finish``;
    or ``delay`` (leave it scaled for the next backward to add to); or ``put_back`` (there was no
    such backward).

    Args:
        lazy: keeps the masters' gradients until somebody reads them; None: they are stored at once.
        own: tells which gradients of masters no script has written; None: there are no masters.

    Attributes:
        scaled: those that are still multiplied by a loss scale.
        stepped: those that a step has used, and left for the next backward outside to add to.
        elsewhere: half parameters of which other ranks step the masters (ZeRO). Their gradients go
            before the next pass, which would share them once more, or stay scaled.
    """

    def __init__(self, lazy: LazyGradients | None = None, own: OwnGradients | None = None) -> None:
        self._lazy = lazy
        self._own = OwnGradients() if own is None else own
        self._came_from_outside = False  # of ``scale_loss``: what was received last
        self.scaled = ScaledGradients()
        self._aside = EarlierGradients()
        self._received = ReceivedGradients(lazy)
        # of the last pass, until `show` and `finish`
        self._written: ParamPairs | None = None
        self._halves: list[Tensor] = []
        self._unscaled: list[Tensor] = []
        self._used = UsedGradients()
        self.stepped = SteppedGradients(self._used, self._own)
        self._usual = UsualPass(lazy, self._aside, self._received, self._used)
        self._any_pass = AnyPass(lazy, self._aside)
        self._buffers = GradientBuffers(ParamPairs([], []))
        self._has_warned = False
        self.elsewhere: list[Tensor] = []

    @property
    def are_pending(self) -> bool:
        """True where a scaled loss has left gradients that no step has used yet."""
        return self.scaled.scale is not None or bool(self._received)

    @property
    def take_unscaled(self) -> bool:
        """True where a backward outside of ``scale_loss`` may have left what masters are to get."""
        return self.scaled.scale is None and (self._came_from_outside or not self._received)

    @property
    def may_be_cleared(self) -> bool:
        """True where gradients that no step has used yet are not as a backward left them."""
        return self.scaled.scale is not None or not self._received.are_untouched()

    @property
    def are_left(self) -> bool:
        """True in the first pass behind a step whose gradients were not cleared."""
        return bool(self._aside) and not self.are_pending

    @property
    def are_earlier(self) -> bool:
        """True in a pass that adds to what an earlier one has left."""
        return bool(self._aside) or self.scaled.scale is not None

    @property
    def _are_waiting(self) -> bool:
        """True while the masters' gradients wait until somebody reads them."""
        return self._lazy is not None and self._lazy.are_waiting

    def are_delayed(self, pairs: ParamPairs) -> bool:
        """True while gradients are still multiplied by a loss scale."""
        written = chain(pairs.model, self.elsewhere)
        if self.scaled.scale is not None and all(param.grad is None for param in written):
            # The user dropped them (model.zero_grad(), p.grad = None) and all that came before.
            for param, master in zip(*pairs, strict=True):
                if param is not master:
                    master.grad = None
            self.forget()
        return self.scaled.scale is not None

    def forget(self) -> None:
        """The gradients were cleared or stepped: none is scaled or set aside any more."""
        if self.scaled.scale is not None:
            self.scaled.forget()
        if self._received or self._aside:  # to save time: `zero_grad` finds neither after a step
            self._aside.clear()
            self._received.clear()
            if self._came_from_outside:  # half gradients have no scale: a backward may add to them
                self._used.note_versions()
                self._came_from_outside = False
        self._own.forget()

    def are_used(self, pairs: ParamPairs) -> bool:
        """Return whether only gradients are there that a step has used; waits for the device."""
        used = set(map(id, self._used.alive()))
        left = [grad for param in pairs.model if id(grad := param.grad) in used]
        # a float32 parameter is its own master, and keeps its gradient
        masters = [master for param, master in zip(*pairs, strict=True) if master is not param]
        if self._are_waiting or not left or any(map(_has_grad, masters)):
            return False
        return any(_is_nonzero(grad) for grad in left if grad is not None)

    def are_cleared(self, pairs: ParamPairs) -> bool:
        """Return whether there is no gradient, neither at a parameter or a master nor aside."""
        return not self._are_waiting and not self._aside and not any(map(_has_grad, chain(*pairs)))

    def are_zero(self, pairs: ParamPairs) -> bool:
        """Return whether those that wait aside are 0, and so those of masters; waits for a device.

        Nothing but 0 is what a script leaves that clears in place.
        """
        found = chain(self._aside.grads, map(stored_grad, pairs.master))
        grads = [kernels.values(local(grad)) for grad in found if grad is not None]
        return not self._are_waiting and not any(bool(grad.any()) for grad in grads)

    def drop(self, pairs: ParamPairs) -> None:
        """Clear all gradients: those of parameters and masters, set aside or waiting."""
        if self._lazy is not None:
            self._lazy.drop()
        for tensor in chain(*pairs):
            tensor.grad = None
        # of a pass that ended between `receive` and `finish`: no later one may finish it
        self._written, self._halves, self._unscaled = None, [], []
        self.forget()

    def clear(self, pairs: ParamPairs, cleared: set[int]) -> None:
        """Clear those of some parameters that are aside, at masters, or waiting.

        Args:
            pairs: of the optimizer.
            cleared: ids of parameters.
        """
        self._aside.drop(cleared)
        self._clear_masters(
            master
            for param, master in zip(*pairs, strict=True)
            if param is not master and id(param) in cleared
        )

    def follow_cleared_by_step(self, pairs: ParamPairs) -> None:
        """Clear those of half parameters whose masters' the step has cleared itself.

        Not behind a block, of which the next backward takes none up.
        """
        if self._came_from_outside:
            received = set(map(id, self._received.params()))
            for param, master in zip(*pairs, strict=True):
                if id(param) in received and stored_grad(master) is None:
                    store_grad(param, None)

    def clear_elsewhere(self) -> None:
        """Clear those of parameters whose masters other ranks step."""
        if self.elsewhere:
            clear_grads(self.elsewhere)

    def _clear_masters(self, masters: Iterable[Tensor]) -> None:
        masters = [*masters]
        if masters and self._lazy is not None and self._lazy.are_waiting:
            self._lazy.discard(masters)
        clear_grads(masters)

    def set_aside(self, pairs: ParamPairs, scale: float | Tensor) -> None:
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
        if not have_none(pairs.model):
            if self.take_unscaled:
                self.receive_unscaled(pairs)
            if self._aside.take(pairs.model) and self._lazy is not None:
                self._lazy.materialize()  # while it is what a view of others' memory was
        self._came_from_outside = False

    def wrote(self, pairs: ParamPairs) -> bool:
        """Return whether a backward has written gradients since `set_aside`."""
        if self.scaled.scale is not None:
            return self.scaled.were_written()
        return any(map(_has_grad, pairs.model))

    def delay(self, pairs: ParamPairs, scale: float | Tensor) -> None:
        """Leave what the backward wrote scaled."""
        written = chain(pairs.model, self.elsewhere)
        if self.scaled.scale is None and not any(map(_has_grad, written)):
            self.finish()  # it reached none of them
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

    def receive(self, pairs: ParamPairs, scale: float | Tensor | None) -> tuple[GradCheck, Tensors]:
        """Unscale and check what the backward wrote, and add what was set aside.

        Args:
            pairs: of the optimizer.
            scale: of the loss; None: there was none, and no overflow has a consequence.

        Returns:
            What the check found, and the parameters that got a gradient, in the same order.
        """
        grads: list[Any] = look_up(_GRAD, pairs.model)
        if not are_complete(grads):
            pairs = pairs.select([grad is not None for grad in grads])
            grads = [grad for grad in grads if grad is not None]
        if not self._buffers.fits(pairs):
            self._buffers = GradientBuffers(pairs)
        if self._buffers.is_spread:
            grads = place_gradients(pairs.model, grads)
        check = self._any_pass.take(self._buffers, Written(pairs, grads, scale))
        if grads and not self._buffers.is_in_place:
            self._written, self._halves = pairs, grads
            self._unscaled = check.grads
        self.scaled.forget()
        return check, self._buffers.params

    def receive_alone(
        self, pairs: ParamPairs, scale: float | Tensor | None
    ) -> tuple[GradCheck, Tensors]:
        """Do `receive`, `show` and `finish`, for a pass in which no other optimizer received.

        Most often it is a `UsualPass`.
        """
        check = self._usual.take(self._buffers, pairs, scale)
        if check is None:
            found = self.receive(pairs, scale)
            self.show(scale)
            self.finish()
            return found
        self.scaled.forget()
        return check, self._buffers.params

    def show(self, scale: float | Tensor | None) -> None:
        """Let half gradients hold what their masters have received.

        Not those that a fused step is to unscale, which stay as the backward left them.

        Args:
            scale: as `receive` got it; where nothing was multiplied they may hold it already.
        """
        unscaled, self._unscaled = self._unscaled, []
        was_scaled = isinstance(scale, Tensor) or (scale is not None and scale != 1.0)
        is_shown = not (was_scaled or self._any_pass.has_added)
        if self._lazy is not None or self._written is None or is_shown:
            return
        if self._any_pass.has_added or any(map(_IS_SPARSE, self._halves)):
            show(self._written)
        else:
            self._buffers.copy_back(self._halves, unscaled)

    @without_default_device
    def show_again(self, pairs: ParamPairs) -> None:
        """The gradients of these masters were clipped."""
        if self._received and self._lazy is None:
            if replaced := show(pairs):
                self._used.add(map(weakref.ref, replaced))
            self._received.note_again(pairs.model)

    def finish(self) -> None:
        """End a pass: half gradients are as the script gets them, and those set aside are back."""
        written, self._written, self._halves = self._written, None, []
        if written is not None:
            halves: list[Any] = look_up(_GRAD, written.model)  # any optimizer may have shown others
            references = self._buffers.references(halves)
            if not self._received:
                # those that go back to parameters which got none since are used still
                aside = self._aside.grads
                self._used.begin(self._used.among(aside) if aside else ())
            self._used.add(references)
            self._received.note(written.model, halves, references)
        self._aside.give_back()

    def receive_unscaled(self, pairs: ParamPairs) -> None:
        """Give masters what a backward outside of ``scale_loss`` left at their parameters.

        It is added to what the backward wrote to masters themselves. Where a script has given them
        gradients, these are stepped alone. Those that a step has used are left where they are,
        until they are written to. Call it where `take_unscaled`.
        """
        if are_same(*pairs) or self._are_waiting:
            return
        were_shown = bool(self._received)
        if were_shown and not self._take_back(pairs):
            return
        not_new = {id(grad) for grad in (*self._used.unwritten(), None)}
        rows = [
            param is not master and id(stored_grad(param)) not in not_new
            for param, master in zip(*pairs, strict=True)
        ]
        given = pairs.select(rows)
        earlier = [master for master in given.master if stored_grad(master) is not None]
        if given.model and all(map(self._own.has, earlier)):
            self.receive(given, None)
            self.finish()
            self._came_from_outside = True
            if were_shown:
                self.note_shown(pairs)

    def note_shown(self, pairs: ParamPairs) -> None:
        """A script gets the masters before their step: a further backward outside may follow."""
        if self._came_from_outside:
            for master in pairs.master:
                self._own.note(master)

    def give_back(self, pairs: ParamPairs) -> None:
        """A backward outside of ``scale_loss`` comes, and adds to what a script wrote to masters'.

        Half parameters get that, rounded; masters are given the sum. Those that nobody has written
        to are left, for `_take_back` replaces them behind the backward.
        """
        self._follow_zeroed(pairs)
        if not self.are_pending and not have_none(pairs.master):
            for param, master in zip(*pairs, strict=True):
                given = param is not master and stored_grad(master) is not None
                if given and not self._own.has(master):
                    give_rounded(param, master)
        if not self._came_from_outside or self._are_waiting:
            return
        received = set(map(id, self._received.params()))
        shown = pairs.select([id(param) in received for param in pairs.model])
        if all(map(self._own.has, shown.master)):
            return
        self._used.drop(look_up(_GRAD, self._received.params()))
        self._received.clear()
        for param, master in zip(*shown, strict=True):
            give_rounded(param, master)
        self._own.forget()

    def _follow_zeroed(self, pairs: ParamPairs) -> None:
        """Take what a block has left for cleared where the script has zeroed it in place.

        What a backward outside adds to it is new, though the tensors are those of the block.
        """
        if self.are_pending and not self._came_from_outside and self.may_be_cleared:
            self.drop_cleared(pairs)
        if not self.are_pending and not self._used.are_left:
            used = set(map(id, self._used.alive()))
            left = [grad for param in pairs.model if id(grad := stored_grad(param)) in used]
            self._used.note_versions(
                grad for grad in left if grad is not None and not _is_nonzero(grad)
            )

    def _take_back(self, pairs: ParamPairs) -> bool:
        """Take from masters what they were given to be shown, if a backward outside came later.

        It has added to the half gradients. Where a script has written to the masters', these are
        what it wants stepped.

        Returns:
            Whether there is something to receive.
        """
        rows = [
            (param, master)
            for param, master in zip(*pairs, strict=True)
            if param is not master and stored_grad(master) is not None
        ]
        are_own = all(self._own.has(master) for _, master in rows)
        if not are_own:
            self.tell_of_writes(pairs)
            return False
        if self._received.are_untouched():
            return False
        for param, master in rows:
            rest = None if stored_grad(param) is None else self._own.sums.get(id(master))
            store_grad(master, None if rest is None else rest.clone())
            self._own.note(master)
        self._used.drop(look_up(_GRAD, self._received.params()))
        self._received.clear()
        return True

    def drop_cleared(
        self, pairs: ParamPairs, by_value: bool = False, among: set[int] | None = None
    ) -> None:
        """Where the user cleared a half gradient, drop what its master was given of it, too.

        Args:
            pairs: of the optimizer.
            by_value: see `ReceivedGradients.changes`.
            among: ids of the parameters that are looked at; None: all.
        """
        if self.are_delayed(pairs):
            return
        if self._came_from_outside:
            self.receive_unscaled(pairs)
        own = pairs if among is None else pairs.select([id(one) in among for one in pairs.model])
        (params, masters), written = self._received.changes(own, by_value)
        for grad, is_another in written:
            self._tell_of_write(grad, is_another)
        self._clear_masters(masters)
        # a batch norm's in float32 have no masters to be cleared at, and go on with no half ones
        halves = [param for param, master in zip(*pairs, strict=True) if param is not master]
        self._received.keep(halves or pairs.model, set(map(id, params)))

    def tell_of_writes(self, pairs: ParamPairs) -> None:
        """Warn where half gradients hold other numbers than their masters were given."""
        if self._received and not self._has_warned and not self._received.are_untouched():
            for grad, is_another in self._received.changes(pairs).written:
                self._tell_of_write(grad, is_another)

    def _tell_of_write(self, grad: Tensor, is_another: bool) -> None:
        """Warn of a write to a half gradient that no step reads; to one that waits it is refused.

        Args:
            grad: of the parameter, as it is.
            is_another: it took the place of the one that the backward wrote.

        Raises:
            RuntimeError: see `UnscaledLater.refuse_written`.
        """
        source = None if self._lazy is None else self._lazy.source
        if isinstance(source, LargeInHalf):
            source.refuse_write_to(grad)
        # kernels refuse to step with one that was written to
        if not self._has_warned and (is_another or not isinstance(source, HalfGradients)):
            self._has_warned = True
            warn(
                "What is written to the gradients of half parameters after scale_loss() has no "
                "effect, for the optimizer steps fp32 masters, which have received theirs; got "
                "such a write. Write to those of amp.master_params(optimizer); call "
                "amp.clip_grad_norm_(optimizer, max_norm) to clip; put every backward() into a "
                "scale_loss() of all the optimizers that it is to train."
            )


def _has_grad(param: Tensor) -> bool:
    return stored_grad(param) is not None


def _is_nonzero(grad: Tensor) -> bool:
    return bool(kernels.values(local(grad)).any())


_GRAD = operator.attrgetter("grad")
_IS_SPARSE = operator.attrgetter("is_sparse")
