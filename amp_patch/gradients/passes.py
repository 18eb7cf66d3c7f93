"""What backwards have written to the parameters of one optimizer, taken in as passes.

Unscaled, checked, given to masters, added to what was there: by `UsualPass` where that serves, else
by three calls. What becomes of gradients between passes is `gradients`' subject. Knows pairs of
parameters and masters; no optimizer and no loss scaler.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.distributed.shards import place_gradients
from amp_patch.kernels import GradCheck
from amp_patch.kernels.getters import GRAD, IS_SPARSE
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import STORED_GRAD, Tensors, are_complete, look_up

from .any_pass import AnyPass, TakenPass, Written
from .earlier_gradients import EarlierGradients
from .gradient_buffers import GradientBuffers
from .param_pairs import ParamPairs
from .received_gradients import ReceivedGradients
from .replaced_gradients import ReplacedGradients
from .rounded_gradients import round_into_halves
from .scaled_gradients import ScaledGradients
from .used_gradients import UsedGradients
from .usual_pass import UsualPass


class Passes:
    """Takes in what backwards wrote: ``receive``, ``round_into_halves`` and ``finish``.

    Args:
        lazy: see `Gradients`, as of all of these.
        scaled: those that wait scaled for a pass, which ends that.
        aside: gradients that were there before the pass.
        received: what masters have received since the last step.
        used: half gradients that the step is to use.
        replaced: told that a pass comes.
    """

    def __init__(
        self,
        lazy: LazyGradients | None,
        scaled: ScaledGradients,
        aside: EarlierGradients,
        received: ReceivedGradients,
        used: UsedGradients,
        replaced: ReplacedGradients,
    ) -> None:
        self._lazy, self._scaled, self._aside = lazy, scaled, aside
        self._received, self._used, self._replaced = received, used, replaced
        self._usual = UsualPass(lazy, aside, received, used)
        self._any_pass = AnyPass(lazy, aside)
        # Of the last pass; and of the last one in a block (False), and outside of any (True).
        self._buffers = GradientBuffers(ParamPairs([], []))
        self._kept_buffers: dict[bool, GradientBuffers] = {}

    def forget_buffers(self) -> None:
        """Masters lie in another order: what their gradients are unscaled into is made anew."""
        self._buffers = GradientBuffers(ParamPairs([], []))
        self._kept_buffers.clear()

    def _buffers_of(self, pairs: ParamPairs, is_outside: bool) -> GradientBuffers:
        """Return those of other parameters than the last pass had.

        Blocks, and what is found before them, may take turns, as where a script clears gradients by
        zeros: half parameters alone have what is found.
        """
        kept = self._kept_buffers.get(is_outside)
        if kept is None or not kept.fits(pairs):
            if not is_outside:  # there are other parameters: let go of those
                self._kept_buffers.clear()
            kept = self._kept_buffers[is_outside] = GradientBuffers(pairs)
        return kept

    def receive(self, pairs: ParamPairs, scale: Scale | None) -> TakenPass:
        """Unscale and check what the backward wrote, and add what was set aside.

        Args:
            pairs: of the optimizer.
            scale: of the loss; None: there was none, and no overflow has a consequence.

        Returns:
            The pass, which `round_into_halves` and `finish` are to end.
        """
        self._replaced.read = []
        if self._aside.views:
            self._aside.tell_of_writes()
        grads: list[Any] = look_up(GRAD, pairs.model)
        unreached: list[Tensor] = []
        if not are_complete(grads):
            unreached = [
                param
                for param, master, grad in zip(*pairs, grads, strict=True)
                # not frozen ones: of hundreds each step would ask several times
                if grad is None and param.requires_grad and param is not master
            ]
            pairs = pairs.select([grad is not None for grad in grads])
            grads = [grad for grad in grads if grad is not None]
        if not self._buffers.fits(pairs):
            self._buffers = self._buffers_of(pairs, is_outside=scale is None)
        if self._buffers.is_spread:
            grads = place_gradients(pairs.model, grads)
        check, has_added = self._any_pass.take(self._buffers, Written(pairs, grads, scale))
        self._scaled.forget()
        is_given = bool(grads) and not self._buffers.is_in_place
        was_scaled = isinstance(scale, Tensor) or (scale is not None and scale != 1.0)
        return TakenPass(
            check,
            self._buffers.params,
            pairs if is_given else None,
            grads,
            are_true=not (was_scaled or has_added),
            has_added=has_added,
            unreached=unreached,
        )

    def receive_alone(self, pairs: ParamPairs, scale: Scale | None) -> tuple[GradCheck, Tensors]:
        """Take in and end a pass in which no other optimizer received; most often a `UsualPass`.

        Returns:
            What the check found, and the parameters that got a gradient, in the same order.
        """
        self._replaced.read = []
        if self._aside.views:
            self._aside.tell_of_writes()
        check = self._usual.take(self._buffers, pairs, scale)
        if check is None:
            taken = self.receive(pairs, scale)
            self.round_into_halves(taken)
            self.finish(taken)
            return taken.check, taken.params
        self._scaled.forget()
        return check, self._buffers.params

    def round_into_halves(self, taken: TakenPass) -> None:
        """Let half gradients hold what their masters have received, unless they do.

        Where there were some before the pass, these tensors do, in the place of the backward's.
        Not those that a fused step is to unscale, which stay as the backward left them.
        """
        if self._lazy is not None or taken.given is None:
            return
        have_earlier = False
        if self._aside:
            params, halves = map(self._buffers.of_masters, (taken.given.model, taken.halves))
            have_earlier = self._aside.take_place(params, halves) is not halves
        if taken.are_true and not have_earlier:
            return
        if have_earlier or taken.has_added or any(map(IS_SPARSE, taken.halves)):
            round_into_halves(taken.given)
        else:
            self._buffers.copy_back(taken.halves, taken.check.grads)

    def finish(self, taken: TakenPass, left: Iterable[Tensor] = ()) -> None:
        """End a pass: those set aside are back at parameters that got none.

        Args:
            taken: the pass.
            left: half gradients that it has not reached, and that were not set aside for it.
        """
        if taken.given is not None:
            params = taken.given.model
            halves: list[Any] = look_up(GRAD, params)  # another optimizer may have rounded into new
            references = self._buffers.references(halves)
            if not self._received:
                # What was set aside goes back where this pass wrote none. If a step has used it, it
                # goes on counting as used.
                aside = [*self._aside.grads, *left]
                versions = self._used.versions_of(left)
                self._used.begin(self._used.among(aside) if aside else (), are_older=True)
                self._used.set_versions(versions)
            self._used.add(references)
            stored: Iterable[Any] = ()
            if not self._received.all_wait(halves):
                stored = filter(_IS_THERE, map(STORED_GRAD, taken.given.master))
            stored = list(map(weakref.ref, stored))
            self._received.note(params, halves, references, stored, taken.unreached)
        self._aside.give_back()


_IS_THERE = functools.partial(operator.is_not, None)
