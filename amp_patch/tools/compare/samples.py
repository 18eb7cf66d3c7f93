"""What is kept of a tensor to compare it with its twin at another level: values at fixed places."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

#: Of a larger tensor so many values are kept, at the same places in every run.
SAMPLE = 4096


def sample(tensor: Tensor) -> dict[str, object]:
    """Return what is kept of a floating tensor.

    Returns:
        ``shape``; ``values``: fp32, on the CPU, of at most `SAMPLE` elements; ``nonfinite``: how
        many of all elements are inf or NaN.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    nonfinite = int((~torch.isfinite(flat)).sum())
    if flat.numel() > SAMPLE:
        flat = flat[places(flat.numel()).to(flat.device)]
    values = flat.to("cpu", torch.float32, copy=True)
    return {"shape": list(tensor.shape), "values": values, "nonfinite": nonfinite}


@functools.lru_cache(maxsize=256)
def places(count: int) -> Tensor:
    """Return `SAMPLE` places among ``count``, ascending; takes none of the script's chance."""
    generator = torch.Generator("cpu").manual_seed(count)
    drawn = torch.randint(count, (SAMPLE,), generator=generator, device="cpu")
    return drawn.sort().values


def magnitude(reference: Tensor) -> float:
    """Return the root of the mean square of the finite values; 0 where there are none."""
    finite = reference[torch.isfinite(reference)].double()
    return float(finite.square().mean().sqrt()) if len(finite) else 0.0


def relative_error(level: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference over the norm of the reference.

    Values that are inf or NaN in the reference are left out. Where only the level's are, the error
    is inf; where the reference is 0 throughout and the level is not, it is 1.

    Args:
        level, reference: fp32, of the same shape.
        least: a magnitude (see `magnitude`) that the reference is taken to have at least.
    """
    finite = torch.isfinite(reference)
    level, reference = level[finite].double(), reference[finite].double()
    if not torch.isfinite(level).all():
        return float("inf")
    difference, norm = float((level - reference).norm()), float(reference.norm())
    norm = max(norm, least * math.sqrt(len(reference)))
    if norm == 0:
        return 0.0 if difference == 0 else 1.0
    return difference / norm
