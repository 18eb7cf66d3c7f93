"""What any backward wrote, taken in: unscaled, checked, and given to masters or added to.

`usual_pass` does the same by fewer calls, for what most backwards write. Knows pairs of parameters
and masters; no optimizer and no loss scaler.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.kernels import GradCheck
from amp_patch.kernels.dense_rows import chosen
from amp_patch.kernels.getters import GRAD, IS_SPARSE
from amp_patch.weights.lazy_gradients import LazyGradients, Made, Source
from amp_patch.weights.parameter_lists import Tensors, are_same, have_none, store_grads

from .earlier_gradients import EarlierGradients
from .gradient_buffers import GradientBuffers
from .gradient_sums import add_to_earlier
from .half_gradients import HalfGradients, LargeInHalf
from .param_pairs import ParamPairs


class Written(NamedTuple):
    """What a backward wrote to parameters of one optimizer.

    Attributes:
        pairs: those that have gradients, with their masters.
        grads: these gradients.
        scale: see `Passes.receive`.
    """

    pairs: ParamPairs
    grads: list[Tensor]
    scale: Scale | None


class TakenPass(NamedTuple):
    """What a backward wrote to parameters of one optimizer, unscaled.

    Attributes:
        check: what was found, and the unscaled gradients.
        params: that got a gradient, in the same order.
        given: the same with their masters, which have received gradients; None where each parameter
            is stepped itself.
        halves: the gradients of these parameters.
        are_true: whether they hold what the masters have received: nothing was multiplied or added.
        has_added: whether a gradient was added to an earlier one.
        unreached: half parameters of the optimizer that are trained, and got none.
    """

    check: GradCheck
    params: Tensors
    given: ParamPairs | None
    halves: list[Tensor]
    are_true: bool
    has_added: bool
    unreached: list[Tensor]


#: The check of gradients, and whether any was added to an earlier one.
Found = tuple[GradCheck, bool]


class AnyPass:
    """Unscales and checks the gradients of one optimizer, and adds what was there before.

    Args:
        lazy: see `Gradients`.
        earlier: gradients that were there before the pass.
    """

    def __init__(self, lazy: LazyGradients | None, earlier: EarlierGradients) -> None:
        self._lazy, self._earlier = lazy, earlier

    def take(self, buffers: GradientBuffers, written: Written) -> Found:
        """Take gradients in.

        Args:
            buffers: of these parameters.
            written: by the backward.

        Returns:
            What was found, with the gradients where `GradientBuffers.unscale` has put them.
        """
        lazy, masters = self._lazy, buffers.masters
        if lazy is None or not masters or lazy.are_waiting or not have_none(masters):
            return self._unscale_and_add(buffers, written)
        return self._hold(lazy, buffers, written)

    def _hold(self, lazy: LazyGradients, buffers: GradientBuffers, written: Written) -> Found:
        """Let gradients wait for masters that have none: in half, where the step unscales them."""
        pairs, grads, scale = written
        factor = 1.0 if scale is None else scale
        source: Source
        check: GradCheck
        checked = buffers.check(grads, factor)
        if checked is not None:  # by kernels, which take dense ones
            check, halves = checked, buffers.of_masters(checked.grads)
            masters = None if buffers.is_spread else buffers.masters
            source = HalfGradients(halves, factor, checked, buffers.rows_of_masters, masters)
        elif not isinstance(scale, Tensor) and (late := buffers.unscale_small(grads, scale)):
            halves = buffers.of_masters(late.grads)
            scale = 1.0 if scale is None else scale
            check, source = late, LargeInHalf(halves, scale, buffers.masters)
        else:
            check = buffers.unscale(grads, scale)
            received = buffers.of_masters(check.grads)
            if any(map(IS_SPARSE, received)):
                return self._add_earlier(check, pairs, check.grads)
            source = Made(received)
        lazy.hold(buffers.masters, source)
        if buffers.are_all_masters:
            return check, False
        others = ParamPairs(*map(buffers.in_place, pairs))
        return self._add_earlier(check, others, buffers.in_place(check.grads))

    def _unscale_and_add(self, buffers: GradientBuffers, written: Written) -> Found:
        """Unscale gradients and add them to earlier ones, many of them a share at a time."""
        lazy = self._lazy
        is_first = (lazy is None or not lazy.are_waiting) and have_none(buffers.masters)
        if is_first or buffers.is_spread or not buffers.shares():
            return self._unscale_share(buffers, written)
        if not self._earlier.are_scripts:
            # Earlier half gradients were kept in case the backward fails. It did not, and masters
            # have received them, or will when those that wait are made.
            self._earlier.drop({id(p) for p, m in zip(*written.pairs, strict=True) if p is not m})
        if lazy is not None:
            lazy.materialize()
        found_inf: list[Tensor] = []
        has_added = False
        for rows, pairs, one in buffers.shares():
            share = written._replace(pairs=pairs, grads=chosen(written.grads, rows))
            check, were_added = self._unscale_share(one, share)
            found_inf += check.found_inf
            has_added |= were_added
            del check  # it holds what was unscaled
        return GradCheck(written.grads, found_inf), has_added

    def _unscale_share(self, buffers: GradientBuffers, written: Written) -> Found:
        pairs, grads, scale = written
        check = buffers.unscale(grads, scale)
        if not self._earlier and buffers.is_in_place:
            return check, False
        unscaled = buffers.spread(grads, check.grads)
        if not self._earlier and not buffers.are_all_masters:  # others have theirs in place
            pairs = ParamPairs(*map(buffers.of_masters, pairs))
            unscaled = buffers.of_masters(unscaled)
        return self._add_earlier(check, pairs, unscaled)

    def _add_earlier(self, check: GradCheck, pairs: ParamPairs, targets: list[Tensor]) -> Found:
        """Add what was there before the backward: gradients set aside, or a master's own.

        Args:
            check: of the targets; gets flags that are not 0 where only the sum overflowed.
            pairs, targets: parameters with masters, and their unscaled gradients.
        """
        masters, lazy = pairs.master, self._lazy
        if not self._earlier:
            if (lazy is None or not lazy.are_waiting) and have_none(masters):
                store_grads(masters, targets)
                return check, False
            if are_same(list(map(GRAD, masters)), targets):
                return check, False
        found_inf, were_made = add_to_earlier(pairs, targets, self._earlier.by_param())
        check.found_inf += found_inf
        return check, were_made
