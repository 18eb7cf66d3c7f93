"""The flag by which a device skips an optimizer's step, without the host.

A float32 number on the device: 1 where the gradients were not finite, else 0. torch's fused
optimizers take it, as `torch.amp.GradScaler` hands it over, and change nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer


def skips_by_flag(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer can be skipped by its device."""
    # Of torch's own each group says whether it does: one that was loaded may say otherwise.
    are_fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return are_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def must_be_told(optimizer: Optimizer) -> bool:
    """Return whether the host has to know if the step that is next is skipped.

    Of a skipped first step torch's fused SGD leaves a momentum that nothing was written to.
    """
    return isinstance(optimizer, SGD) and any(
        param.grad is not None and not _has_momentum(optimizer, param)
        for group in optimizer.param_groups
        for param in (group["params"] if group["momentum"] != 0 else ())
    )


def _has_momentum(optimizer: Optimizer, param: Tensor) -> bool:
    return optimizer.state.get(param, {}).get("momentum_buffer") is not None


def step_by_flag(optimizer: Optimizer, flag: Tensor, step: Callable[[], Any]) -> Any:
    """Return what a step returned that an optimizer of torch makes only where a flag is 0."""
    given: Any = optimizer
    given.grad_scale, given.found_inf = None, flag
    try:
        return step()
    finally:
        del given.grad_scale, given.found_inf
