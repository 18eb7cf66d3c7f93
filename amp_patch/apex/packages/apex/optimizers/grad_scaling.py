"""What torch's GradScaler tells an optimizer that unscales for itself; knows no formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def scaling_of(
    optimizer: Optimizer, grad_scaler: Any, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return whether gradients are not finite, and what they are to be multiplied by.

    Args:
        optimizer: ``found_inf`` and ``grad_scale`` are its attributes where somebody set them.
        grad_scaler: the `torch.amp.GradScaler` that was handed to ``step``, or None.
        device: where the tensors are wanted.

    Returns:
        Both float32 of shape (1,): not 0 where they are not; one over the scale.
    """
    if grad_scaler is not None:
        found_inf = grad_scaler._check_inf_per_device(optimizer)[device]
        stage = grad_scaler._per_optimizer_states[id(optimizer)]["stage"]
        scale = None if stage.name == "UNSCALED" else grad_scaler._get_scale_async()
    else:
        found_inf = getattr(optimizer, "found_inf", None)
        scale = getattr(optimizer, "grad_scale", None)
    ones = torch.ones(1, device=device, dtype=torch.float32)
    inverse = ones if scale is None else scale.to(device).double().reciprocal().float().reshape(1)
    found = 0 * ones if found_inf is None else found_inf.to(device, torch.float32).reshape(1)
    return found, inverse
