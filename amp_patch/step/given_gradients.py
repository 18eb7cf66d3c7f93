"""Gradients that an optimizer is to step with, and that no block of the step has checked.

A script that shares gradients by hand brings in what another rank has found. One that keeps those
of several blocks, as PCGrad does, puts back what has overflowed. And one that does not clear what a
skipped step has left adds to it. Knows one optimizer's parameters and its skips; no scale.
"""

from __future__ import annotations

import math

import torch

from amp_patch.distributed.agreement import any_rank
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.torch_norms import combined, norms_of
from amp_patch.weights.parameter_lists import stored_grad

from .held_params import HeldParams
from .skip import Skip

NOT_CLEARED = (
    "Gradient overflow.  Skipping step, gradients of a skipped step were not cleared: call "
    "optimizer.zero_grad() between steps"
)


def skip_nonfinite(skip: Skip, held: HeldParams, are_shared: bool) -> None:
    """Ask for a skip where the gradients that are to be stepped are not finite; may wait.

    Args:
        skip: is asked, unless it knows a reason already.
        held: whose gradients they are; all of its ranks must come here.
        are_shared: whether the script may have shared them by hand. Else they are looked at only
            where gradients that overflowed were cleared since the last step, or left by it.
    """
    if skip.is_certain or not (are_shared or skip.cleared.known() or skip.left.known()):
        return
    grads = [grad for grad in map(stored_grad, held.pairs().master) if grad is not None]
    if grads and captures.are_made(grads[0].device):
        return
    is_finite = not grads or bool(torch.isfinite(combined(norms_of(grads, math.inf), math.inf)))
    if any_rank(not is_finite, held.ranks.groups):
        if are_shared:
            skip.ask(
                "Gradient overflow.  Skipping step, gradients that ranks share after "
                "scale_loss() are not finite"
            )
        elif skip.cleared.known():
            skip.ask(
                "Gradient overflow.  Skipping step, gradients were put back that had "
                "overflowed before they were cleared"
            )
        else:
            skip.ask(NOT_CLEARED)
