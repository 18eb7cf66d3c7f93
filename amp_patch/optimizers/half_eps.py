"""Tells of an ``eps`` that is 0 in float16, where an optimizer steps float16 parameters (O3).

torch's optimizers keep their state in the parameters' dtype. Where they divide by
``state.sqrt() + eps``, that is 0 / 0 for a gradient of 0, and x / 0 for one so small that its
square is 0 in float16.

A larger ``eps`` makes that x / eps: no NaN, but with 1e-4 a step of Adam's of up to 50 times lr.
For (1 - beta2) times the square of a gradient below sqrt(2**-25 / 1e-3) = 5.5e-3 is 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from amp_patch.common.warn_once import warn_once

from .wrapped_optimizers import wrapped_by

#: A number up to this one is rounded to 0 in float16.
ROUNDS_TO_ZERO = 2.0**-25


def warn_of_eps(optimizer: Optimizer) -> None:
    """Warn, once, where an optimizer is about to divide by 0.

    Of one that is not torch's its state tells, which may be in float32: see `watch_first_step`.
    What it wraps steps its groups.
    """
    for one in (optimizer, *wrapped_by(optimizer)):
        _warn_of_one(one)


def _warn_of_one(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps > ROUNDS_TO_ZERO:
            continue
        halves = [one for one in group["params"] if one.dtype is torch.float16]
        if any(one.requires_grad and _adds_in_half(optimizer, group, one) for one in halves):
            name = type(optimizer).__name__
            module = "torch.optim." if _is_of_torch_optim(optimizer) else ""
            warn_once(
                f"an optimizer that steps float16 weights needs an eps that float16 can hold; got "
                f"{name} with eps={eps:g}, which is 0 there: a gradient of 0 makes NaN of its "
                f"weight. Call {module}{name}(..., eps=1e-4), or "
                "amp.initialize(..., opt_level='O2'). That eps keeps NaN out, and no more: squares "
                "of small gradients (Adam's below 5e-3) are 0 in float16, and their weights step "
                "by lr * gradient / eps; O2 keeps that state in float32."
            )


def watch_first_step(optimizer: Optimizer) -> Callable[[], None]:
    """Call `warn_of_eps` after the first step of what is not torch's, an optimizer or one in it.

    Args:
        optimizer: is not asked where it takes none of torch's hooks.

    Returns:
        What ends it.
    """
    halves = (
        one.dtype is torch.float16 for group in optimizer.param_groups for one in group["params"]
    )
    steppers = [
        one
        for one in (optimizer, *wrapped_by(optimizer))
        if not _is_of_torch_optim(one)
        and isinstance(getattr(one, "_optimizer_step_post_hooks", None), OrderedDict)
    ]
    if not steppers or not any(halves):
        return lambda: None
    has_looked = False

    def look(stepped: Optimizer, *_: object) -> None:
        # The hook stays: torch goes through all of them while this runs.
        nonlocal has_looked
        if not has_looked:
            has_looked = True
            warn_of_eps(stepped)

    handles = [one.register_step_post_hook(look) for one in steppers]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _is_of_torch_optim(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _adds_in_half(optimizer: Optimizer, group: Mapping[str, object], param: Tensor) -> bool:
    """Tell whether an optimizer adds ``eps`` to float16 numbers of a parameter's state."""
    if _is_of_torch_optim(optimizer):
        # torch's fused kernels compute in float32
        return not (isinstance(optimizer, (Adam, AdamW)) and group.get("fused"))
    state = optimizer.state.get(param)
    values = state.values() if isinstance(state, Mapping) else ()  # it may be anything there
    return any(isinstance(one, Tensor) and one.dtype is torch.float16 for one in values)
