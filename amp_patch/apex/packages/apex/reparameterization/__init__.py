"""apex.reparameterization: weight norm on and off, for a whole model at once."""

from . import weight_norm
from .weight_norm import apply_weight_norm, remove_weight_norm

__all__ = ["apply_weight_norm", "remove_weight_norm", "weight_norm"]
