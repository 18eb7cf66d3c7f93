"""A step that its device skips: the host learns of it when it asks. Knows optimizers of torch.

torch's fused optimizers take a flag, and step only where it is 0 (as `torch.amp.GradScaler` has
them do); what they wrote to before is as if there had been no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_patch.kernels.graph_capture import captures


def skips_by_flag(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer can be skipped by its device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


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


class DeviceSkip:
    """Whether the next step is to be skipped, on its device.

    Attributes:
        flag: fp32, 0-dim, not 0 where it is; None where no device knows of any reason.
    """

    def __init__(self) -> None:
        self.flag: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """True where a flag was raised or may have been."""
        return self.flag is not None

    def add(self, found_inf: Tensor) -> None:
        """Skip the next step where a flag (fp32, one element) or an earlier one is not 0."""
        flag, earlier = found_inf.reshape(()), self.flag
        if earlier is not None:
            flag = torch.maximum(earlier, flag.to(earlier.device, non_blocking=True))
        self.flag = flag

    def forget(self) -> None:
        """The next step has other gradients."""
        self.flag = None

    def found(self) -> bool:
        """Return whether the next step will be skipped. Waits for the device."""
        return self.flag is not None and captures.wait_for(self.flag)


def step_by_flag(optimizer: Optimizer, flag: Tensor, step: Callable[[], Any]) -> Any:
    """Return what a step returned that an optimizer of torch makes only where a flag is 0."""
    given: Any = optimizer
    given.grad_scale, given.found_inf = None, flag
    try:
        return step()
    finally:
        del given.grad_scale, given.found_inf
