"""apex.contrib.layer_norm: layer norm over the last dimension."""

from . import layer_norm
from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm", "layer_norm"]
