"""The end of an optimizer's backwards: `amp.deactivate` leaves gradients that are true, or none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import chain

from amp_patch.common.warn_once import warn
from amp_patch.gradients.any_pass import TakenPass
from amp_patch.optimizers.fused_step import FusedStep

from .optimizer_backward import OptimizerBackward


def release(
    backward: OptimizerBackward, fused: FusedStep | None, unscaled: set[int]
) -> Callable[[], None]:
    """Nobody skips the next step: unscale scaled gradients, drop those that overflowed.

    Args:
        backward: of the optimizer.
        fused: what steps in its place; None where it steps itself.
        unscaled: ids of what other optimizers have unscaled so, which this one may hold as
            well; its own are added.

    Returns:
        What is to be called when all optimizers have done so: two may read the same gradient.
    """
    backward.shown.end()
    if not backward.current.is_open:
        backward.joined.take_over()
    if backward.current.is_open:  # deactivated in a block, after its backward
        backward.current.end_early(steps=False)
    with contextlib.suppress(FloatingPointError):  # of no interest, for the scale goes, too
        backward.skip.settle()
    if backward.gradients.may_be_cleared:
        with contextlib.suppress(RuntimeError):  # of a write, of which `_end` tells
            backward.cleared.drop()
    scale, taken = backward.gradients.scaled.scale, None
    if scale is not None and backward.gradients.are_delayed(backward.pairs()):
        taken = backward.gradients.passes.receive(backward.pairs().share(unscaled, "master"), scale)
    return functools.partial(_end, backward, fused, taken)


def _end(backward: OptimizerBackward, fused: FusedStep | None, taken: TakenPass | None) -> None:
    overflow = backward.skip.found()
    if taken is not None:
        overflow |= taken.check.overflow
        backward.gradients.passes.finish(taken)
    if overflow:
        for tensor in chain(*backward.pairs()):
            tensor.grad = None
    else:
        backward.shown.receive_unscaled()
    backward.skip.forget()
    backward.current.reached.release()
    # Nobody makes gradients later: those that wait are stored, or are lost with a warning.
    written = None if fused is None else fused.lazy.materialize_or_drop()
    if written is not None:
        warn(str(written))
