"""Layer norm over the last dimension; all of it is ``apex.normalization``'s."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...normalization.fused_layer_norm import mixed_dtype_fused_layer_norm_affine


class FastLayerNormFN:
    """What scripts call the `apply` of; some look for arguments of its forward."""

    @staticmethod
    def apply(
        x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        """Normalize x, shape (..., hidden), in float32, and return it in gamma's dtype.

        Args:
            gamma, beta: weight and bias, shape (hidden,).
            epsilon: added to the variance.
            memory_efficient: no effect.
        """
        return mixed_dtype_fused_layer_norm_affine(x, gamma, beta, gamma.shape, epsilon)

    forward = apply


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension; the output has the weight's dtype.

    Args:
        hidden_size: features.
        eps: added to the variance.
        memory_efficient: no effect.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize an input of shape (..., hidden_size) and any floating dtype."""
        return FastLayerNormFN.apply(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
