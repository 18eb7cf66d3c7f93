"""Tells of an ``eps`` that is 0 in float16, where an optimizer steps float16 parameters (O3).

torch's optimizers keep their state in the parameters' dtype. Where they divide by
``state.sqrt() + eps``, that is 0 / 0 for a gradient of 0, and x / 0 for one so small that its
square is 0 in float16.
"""

from __future__ import annotations

import torch
from torch.optim import Adam, AdamW, Optimizer

from amp_patch.warn_once import warn_once

#: A number up to this one is rounded to 0 in float16.
ROUNDS_TO_ZERO = 2.0**-25


def warn_of_eps(optimizer: Optimizer) -> None:
    """Warn, once, where an optimizer of torch is about to divide by 0."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # its state may be in float32
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps > ROUNDS_TO_ZERO or _adds_in_float32(optimizer, group):
            continue
        if any(one.dtype is torch.float16 and one.requires_grad for one in group["params"]):
            name = type(optimizer).__name__
            warn_once(
                f"an optimizer that steps float16 weights needs an eps that float16 can hold; got "
                f"{name} with eps={eps:g}, which is 0 there: a gradient of 0 makes NaN of its "
                f"weight. Call torch.optim.{name}(..., eps=1e-4), or "
                "amp.initialize(..., opt_level='O2')."
            )


def _adds_in_float32(optimizer: Optimizer, group: dict[str, object]) -> bool:
    """Return whether it is one of torch's fused kernels, which compute in float32."""
    return isinstance(optimizer, (Adam, AdamW)) and bool(group.get("fused"))
