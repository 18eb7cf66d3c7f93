"""The rule that moves a loss scale, on its device."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Move a loss scale after one backward pass, as `torch.amp.GradScaler` does, but patiently.

    It falls only when ``hysteresis`` overflows came with no finite pass between them, and grows
    after ``growth_interval`` finite ones, unless that gave inf.

    Args:
        current_scale: float32, shape (1,); changed in place.
        growth_tracker: int32, shape (1,), finite passes in a row; changed in place.
        hysteresis_tracker: int32, shape (1,), overflows left until it falls; changed in place.
        found_inf: float32, shape (1,), above 0 where a gradient was not finite.
        growth_factor, backoff_factor: what the scale is multiplied by.
        growth_interval: finite passes in a row until it grows.
        hysteresis: overflows until it falls.

    Returns:
        ``current_scale``. Nothing waits for the device.
    """
    overflow = found_inf > 0
    hysteresis_tracker.sub_(overflow.to(hysteresis_tracker.dtype))
    falls = overflow & (hysteresis_tracker <= 0)
    successful = growth_tracker + 1
    due = ~overflow & (successful == growth_interval)
    grown = current_scale * growth_factor
    grows = due & torch.isfinite(grown)
    moved = torch.where(falls, current_scale * backoff_factor, current_scale)
    current_scale.copy_(torch.where(grows, grown, moved))
    growth_tracker.copy_(torch.where(overflow | due, 0, successful))
    hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker, hysteresis))
    return current_scale
