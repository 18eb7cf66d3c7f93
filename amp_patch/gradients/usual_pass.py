"""What the usual backward wrote, taken in by a few calls of torch.

In most steps each parameter has a dense gradient, and nothing was there before but what an earlier
pass has received in the same way. `Passes.receive` does the same for every other pass, by three
times as many calls.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.common.scales import Scale
from amp_patch.kernels import GradCheck
from amp_patch.kernels.getters import DTYPE, GRAD, IS_SPARSE
from amp_patch.kernels.without_grad import without_grad
from amp_patch.weights.lazy_gradients import LazyGradients, Made
from amp_patch.weights.parameter_lists import (
    are_complete,
    are_same,
    have_none,
    look_up,
    store_grads,
    stored_grads,
)

from .earlier_gradients import EarlierGradients
from .gradient_buffers import GradientBuffers
from .param_pairs import ParamPairs
from .received_gradients import ReceivedGradients
from .target_pool import TargetPool
from .used_gradients import UsedGradients


class UsualPass:
    """Unscales, checks and stores the gradients of one optimizer, where its passes are usual.

    Args:
        lazy: see `Gradients`, as of all of these.
        earlier: gradients that were there before the pass.
        received: what masters have received since the last step.
        used: half gradients that the step is to use.
    """

    def __init__(
        self,
        lazy: LazyGradients | None,
        earlier: EarlierGradients,
        received: ReceivedGradients,
        used: UsedGradients,
    ) -> None:
        self._lazy, self._earlier = lazy, earlier
        self._received, self._used = received, used

    def take(
        self, buffers: GradientBuffers, pairs: ParamPairs, scale: Scale | None
    ) -> GradCheck | None:
        """Take in a gradient of each parameter.

        Args:
            buffers: of the last pass.
            pairs, scale: see `Passes.receive`.

        Returns:
            What was found; None, with nothing done, where the pass is another.
        """
        pool = buffers.pool
        if pool is None and (buffers.is_spread or not buffers.is_in_place):
            return None
        grads: list[Any] = look_up(GRAD, pairs.model)
        if not (are_complete(grads) and buffers.fits(pairs)):
            return None
        is_first = not (self._earlier or self._received)
        if pool is None:
            if is_first:
                return buffers.unscale(grads, scale)
            return self._add_in_place(buffers, grads, scale)
        give = self._give if is_first else self._give_more
        return give(pool, buffers, grads, scale)

    def _add_in_place(
        self, buffers: GradientBuffers, grads: list[Tensor], scale: Scale | None
    ) -> GradCheck | None:
        """Add to what all parameters, which are stepped themselves, had before the pass."""
        params, earlier = self._earlier.params, self._earlier.grads
        if not (are_same(params, buffers.params) and _may_be_added(earlier, grads)):
            return None
        check = buffers.unscale(grads, scale)
        _add(params, earlier, grads)
        self._earlier.end()
        return check

    def _give(
        self,
        pool: TargetPool,
        buffers: GradientBuffers,
        grads: list[Tensor],
        scale: Scale | None,
    ) -> GradCheck | None:
        """Give masters, which have none, their gradients."""
        lazy, masters = self._lazy, buffers.masters
        if (lazy is not None and lazy.are_waiting) or not have_none(masters):
            return None
        check = pool.take(grads, scale, shows=lazy is None)
        if check is None:
            return None
        if lazy is None:
            store_grads(masters, pool.targets)
        else:
            lazy.hold(masters, Made([*pool.targets]))  # whose references tell that they are held
        references = buffers.references(grads)
        self._used.begin(references)
        self._received.note(buffers.params, grads, references, pool.targets)
        return check

    def _give_more(
        self,
        pool: TargetPool,
        buffers: GradientBuffers,
        grads: list[Tensor],
        scale: Scale | None,
    ) -> GradCheck | None:
        """Add to what an earlier pass has given to all masters, and the others have."""
        lazy = self._lazy
        if lazy is not None:
            lazy.materialize()
        if not (self._received and pool.are_targets(stored_grads(buffers.masters))):
            return None
        own, theirs, earlier = buffers.own, [], []
        if own:
            theirs, by_param = buffers.in_place(grads), self._earlier.by_param()
            earlier = list(map(by_param.get, map(id, own)))
            if not (are_complete(earlier) and _may_be_added(earlier, theirs)):
                return None
        check = pool.take_more(grads, scale)
        if check is None:
            return None
        if lazy is None:
            grads = self._earlier.take_place(buffers.params, grads)
            pool.show(grads)
        if own:
            _add(own, earlier, theirs)
            grads = look_up(GRAD, buffers.params)
        self._earlier.end()  # each parameter has got a new gradient
        references = buffers.references(grads)
        self._used.add(references)
        self._received.note(buffers.params, grads, references, pool.targets)
        return check


def _may_be_added(earlier: list[Any], grads: list[Tensor]) -> bool:
    """Return whether gradients may be added to these by one call, and no sum may overflow."""
    may_overflow = torch.float16 in map(DTYPE, earlier)
    return not (may_overflow or any(map(IS_SPARSE, chain(earlier, grads))))


@without_grad
def _add(params: list[Tensor], earlier: list[Any], grads: list[Tensor]) -> None:
    kernels.accumulate(earlier, grads)
    store_grads(params, earlier)
