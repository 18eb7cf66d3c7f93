"""One backward pass of a scaled loss, as the hooks of a training step in their order.

Knows optimizers and the scaling it is given; no model, level or session.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal, Protocol

from torch import Tensor

from amp_patch.casting.weight_cache import WeightCache
from amp_patch.common.scales import Scale
from amp_patch.distributed.agreement import agree
from amp_patch.distributed.pending_sums import pending_sums
from amp_patch.distributed.process_groups import without_repetition
from amp_patch.distributed.unsynced import Unsynced
from amp_patch.gradients.foreign_gradients import Watch
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.kernels.default_device import without_default_device
from amp_patch.levels import HALVES

from .loss_scaling import Found, LossScaling, PendingCheck
from .optimizer_backward import OptimizerBackward
from .skip import Skip
from .watched_backward import (
    WatchedBackward,
    refuse_another_backward,
    tell_of_strays,
    warn_of_stages,
)


class Other(Protocol):
    """What a backward is not for, but may write gradients to."""

    def expect_foreign(self) -> None:
        """Call before the backward where its loss is not scaled."""

    def watch_foreign(self, scale: Scale) -> Watch:
        """Call before it where the loss is; see `OthersBackwards.watch_foreign`."""

    def note_foreign(
        self, watch: Watch, optimizers: Sequence[OptimizerBackward], scale: Scale
    ) -> None:
        """Call after that, which was for these optimizers, of a loss multiplied by ``scale``."""


#: See ``open_block`` of `BackwardPass`.
BlockOpener = Callable[[Tensor, Callable[[], Iterable[Tensor]]], Callable[[], None]]


class BackwardPass:
    """What `amp.scale_loss` does, for callers that have their own places for it.

    ::

        one = BackwardPass(...)
        one.scale(loss).backward()   # earlier gradients are set aside
        one.unscale_()               # the gradients are true, also those of masters
        one.update()                 # the scale moves; asks for a skip after an overflow
        optimizer.step()             # see `optimizer_step`

    ``scale`` is ``begin`` and ``multiply``, for callers who see the loss long before its backward.
    ``optimizer.step()`` may also come before ``update``, and does its work then. ``leave_scaled``
    takes the place of ``unscale_`` and ``update`` where further passes are to add to the gradients.
    ``abandon`` ends the pass at any point, as if there had been none: whoever calls the hooks calls
    it where one of them, or what stands between them, raises (`scaled_loss` shows how). After
    ``optimizer.zero_grad()`` the next pass starts as after any other.

    Args:
        optimizers: those whose gradients the backward writes.
        others: whose gradients it may reach all the same.
        scaling: multiplies the loss, and moves the scale.
        cache: told when the backward begins, and made stale when it is done.
        on_scaled: gets the loss and the scale when the pass begins; None where nobody asks.
        unsynced: says whether the backward left its gradients on this rank, for a later one to
            share with the others; None where that cannot be.
        open_block: gets the scaled loss, and what returns the parameters that are unscaled; returns
            what is called when they are. None where nobody asks.
    """

    def __init__(
        self,
        optimizers: Sequence[OptimizerBackward],
        others: Sequence[Other],
        scaling: LossScaling,
        cache: WeightCache,
        on_scaled: Callable[[Tensor, Scale], None] | None = None,
        unsynced: Unsynced | None = None,
        open_block: BlockOpener | None = None,
    ) -> None:
        self._optimizers, self._others = optimizers, others
        self._scaling, self._cache = scaling, cache
        self._on_scaled, self._unsynced = on_scaled, unsynced
        self._scale: Scale = scaling.scale()
        if unsynced is not None:  # those that FSDP2 keeps to itself cannot follow a scale
            for one in optimizers:
                if one.unshared_scale is not None:
                    self._scale = one.unshared_scale
        self._are_apart = False
        self._open: list[tuple[OptimizerBackward, ParamPairs]] = []
        self._received: list[tuple[OptimizerBackward, ParamPairs]] = []
        self._pending: PendingCheck | None = None
        self._watches: list[tuple[Other, Watch]] = []
        self._watched: WatchedBackward | None = None
        self._open_block = open_block
        self._close_block: Callable[[], None] | None = None
        self._block: weakref.ref[object] | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32 (float64 stays) times the scale, and make room for gradients.

        Raises:
            RuntimeError: inside another pass of one of the optimizers.
        """
        self.begin()
        scaled_loss = self.multiply(loss)
        if self._scaling.is_on and scaled_loss.grad_fn is not None:
            if self._optimizers[0].zeroing.is_watched:
                self._watched = WatchedBackward(self._optimizers, loss)
                scaled_loss.grad_fn.register_prehook(self._watched)
            if self._open_block is not None:
                self._close_block = self._open_block(scaled_loss, self._params)
        elif self._scaling.is_on:
            warn_of_stages(self._optimizers)
        return scaled_loss

    def is_ended_by(self, block: object) -> None:
        """Be abandoned when this is gone and another pass of an optimizer begins.

        Python calls no ``__exit__`` where Ctrl-C comes right after ``__enter__``.
        """
        self._block = weakref.ref(block)

    @property
    def factor(self) -> Scale:
        """What the loss is multiplied by."""
        return self._scale

    @property
    def is_left(self) -> bool:
        """Whether the pass was of a block that is gone."""
        return self._block is not None and self._block() is None

    @without_default_device
    def begin(self) -> None:
        """Make room for the gradients of a loss that `multiply` returns.

        Raises:
            RuntimeError: inside another pass of one of the optimizers.
        """
        for one in self._optimizers:
            one.current.refuse_nested()
        self._cache.begin_backward()
        is_on = self._scaling.is_on
        if is_on:
            scale = self._scale
            self._watches = [(other, other.watch_foreign(scale)) for other in self._others]
        else:
            for other in self._others:
                other.expect_foreign()
        if not is_on and all(map(_TAKES_GRADS_AS_THEY_ARE, self._optimizers)):
            return
        for one in self._optimizers:
            if one.gradients.may_be_cleared or one.skip.is_certain:
                one.cleared.drop()
        self._begin_each(is_on)

    def _begin_each(self, is_on: bool) -> None:
        is_alone = len(self._optimizers) == 1
        shares = self._share("model")
        if not (is_alone or self._are_apart):
            for one in self._optimizers:  # each has a master of what a plain backward has reached
                one.shown.receive_unscaled()
        for one, pairs in shares:
            self._open.append((one, pairs))
            one.begin(pairs, self._scale, self, is_on, is_alone)

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32 (float64 stays) times the scale."""
        loss = loss.float() if loss.dtype in HALVES else loss
        if self._on_scaled is not None:
            self._on_scaled(loss, self._scale)
        return loss * self._scale if self._scaling.is_on else loss

    def unscale_(self) -> None:
        """Divide what the backward wrote by the scale, and check it; once.

        Where it left that on this rank (``no_sync``), `leave_scaled` is done in its place.

        Raises:
            RuntimeError: it was the backward of another loss.
        """
        if self._pending is not None:
            return
        if self._unsynced is not None and any(self._are_left(*row) for row in self._open):
            self.leave_scaled()
            return
        self._pending = PendingCheck(self._scaling, self._receive(), self._skips())
        self._pending.register()

    def _receive(self) -> list[Found]:
        """Let each optimizer take what the backward wrote, unscaled; return what was found.

        Raises:
            RuntimeError: it was the backward of another loss.
        """
        if pending_sums.begun:
            pending_sums.settle([grad for one in self._params() if (grad := one.grad) is not None])
        self._end_backward()
        if self._watched is not None:
            self._refuse_another(self._watched)
        self._received = self._share("master") if self._open else []
        is_on = self._scaling.is_on
        try:
            found = self._take_in(self._scale if is_on else None)
        except RuntimeError:
            for _, pairs in self._received:
                pairs.refuse_resized()
            raise
        watched = self._watched
        has_none = not any(params for _, params in found)
        if has_none and watched is not None and watched.has_run and not watched.is_of_leaf:
            tell_of_strays(self._optimizers, watched.loss())
        if is_on and any(map(_GROUPS, self._optimizers)):
            self._agree(found)
        return found

    @without_default_device
    def _take_in(self, scale: Scale | None) -> list[Found]:
        if len(self._received) == 1 or self._share_nothing():
            return [one.receive_alone(pairs, scale) for one, pairs in self._received]
        # two optimizers may receive the same half gradients
        found = [(one.gradients.passes, one.receive(pairs, scale)) for one, pairs in self._received]
        for passes, taken in found:
            passes.round_into_halves(taken)
        for passes, taken in found:
            passes.finish(taken)
        return [(taken.check, taken.params) for _, taken in found]

    def _share_nothing(self) -> bool:
        """Return whether no optimizer has, or had when the pass began, a parameter of another."""
        for (_, begun), (_, received) in zip(self._open, self._received, strict=True):
            if begun is not received:
                return False
        return self._are_apart

    def _skips(self) -> list[Skip]:
        return list(map(_SKIP, self._optimizers))

    def _agree(self, found: Sequence[Found]) -> None:
        """Let all ranks that make this step together find the same.

        Raises:
            RuntimeError: they do not hold the same scale.
        """
        groups = [group for one in self._optimizers for group in one.ranks.groups]
        flag = agree(
            [flag for check, _ in found for flag in check.found_inf],
            without_repetition(groups),
            self._optimizers[0].device,
            self._scale,
            self._optimizers[0].skip.count.steps,
        )
        for check, _ in found:
            check.found_inf[:] = [flag]

    def update(self) -> None:
        """Move the scale by what was found, unless the step has done it.

        Raises:
            FloatingPointError: the second overflow in a row with the scale at its floor.
        """
        if self._pending is not None:
            self._pending.settle()

    def end(self) -> None:
        """Unscale and update: no check waits for a step, so where it can be none is registered."""
        if not self._open and not self._scaling.is_on:  # and no master waits
            self._end_backward()
            self._scaling.update((), ())
        elif self._pending is None and self._unsynced is None:
            self._scaling.update(self._receive(), self._skips())
        else:
            self.unscale_()
            self.update()

    def leave_scaled(self) -> None:
        """Leave what the backward wrote multiplied by the scale, unless `unscale_` was called."""
        if self._pending is not None:
            self._pending.settle()
            return
        self._end_backward(is_last=False)
        if self._watched is not None:
            self._refuse_another(self._watched)
        for one, pairs in self._open:
            one.leave_scaled(self._scale)
            if self._are_left(one, pairs):
                one.unshared_scale = self._scale
        self._open = []

    def _are_left(self, one: OptimizerBackward, pairs: ParamPairs) -> bool:
        """Return whether the backward has left gradients of an optimizer on this rank alone."""
        params = chain(pairs.model, one.gradients.elsewhere)
        return self._unsynced is not None and self._unsynced.left(params)

    def abandon(self) -> None:
        """Give up: the scale does not move, and gradients are as before the pass.

        Where `unscale_` had begun to add them to earlier ones, these go as well. May be called
        again.
        """
        self._end_backward()
        if self._pending is not None:
            self._pending.withdraw()
        if self._received:
            for one, _ in self._open:
                one.drop()
        else:
            for one, pairs in self._open:
                one.abandon(pairs)
        self._open, self._received = [], []

    def _end_backward(self, is_last: bool = True) -> None:
        """The backward is over, and wrote what it wrote."""
        if is_last:
            self._cache.mark_stale()
        if self._watches:
            watches, self._watches = self._watches, []
            for other, watch in watches:
                other.note_foreign(watch, self._optimizers, self._scale)
        if self._watched is not None:
            self._watched.is_over = True
        if self._close_block is not None:
            self._close_block()

    def _params(self) -> Iterable[Tensor]:
        return chain.from_iterable(one.pairs().model for one in self._optimizers)

    def _refuse_another(self, watched: WatchedBackward) -> None:
        """Raise if gradients came from another backward than the scaled loss's.

        Raises:
            RuntimeError: as said.
        """
        if not watched.has_run and any(one.gradients.wrote(pairs) for one, pairs in self._open):
            refuse_another_backward()

    def _share(self, by: Literal["model", "master"]) -> list[tuple[OptimizerBackward, ParamPairs]]:
        """Return what each optimizer handles: of what two of them hold, the first one."""
        if len(self._optimizers) == 1:
            (one,) = self._optimizers
            return [(one, one.pairs())]
        every = [one.pairs() for one in self._optimizers]
        self._are_apart = self._optimizers[0].apart.are(every)
        taken: set[int] = set()
        shares = every if self._are_apart else [pairs.share(taken, by) for pairs in every]
        return list(zip(self._optimizers, shares, strict=True))


#: Looked up for each optimizer of a pass by `map`, which calls no Python.
_GROUPS = operator.attrgetter("ranks.groups")
_SKIP = operator.attrgetter("skip")
_TAKES_GRADS_AS_THEY_ARE = operator.attrgetter("takes_grads_as_they_are")
