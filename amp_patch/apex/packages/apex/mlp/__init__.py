"""apex.mlp: linear layers in a row."""

from . import mlp
from .mlp import MLP, mlp_function

__all__ = ["MLP", "mlp", "mlp_function"]
