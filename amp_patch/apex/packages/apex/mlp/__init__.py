"""apex.mlp: linear layers in a row."""

from . import mlp
from .mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp", "mlp_function"]
