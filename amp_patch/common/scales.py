"""What a loss, and with it its gradients, is multiplied by."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

#: A number; of a scale that a device moves a tensor there: fp32, 0-dim.
Scale: TypeAlias = float | Tensor


def is_one(scale: Scale) -> bool:
    """Return whether what it multiplies is true; of a device's nobody asks."""
    return not isinstance(scale, Tensor) and scale == 1.0


def kept(scale: Scale) -> Scale:
    """Return a scale that stays as it is: a device's is moved in place."""
    return scale.clone() if isinstance(scale, Tensor) else scale
