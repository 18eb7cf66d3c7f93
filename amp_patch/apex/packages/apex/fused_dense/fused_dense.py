"""Linear layers, alone and in pairs with GELU between; over torch's functions.

Weights and biases start as standard normal, as in apex: scripts load or initialize them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``input @ weight.T + bias``; shapes (..., in), (out, in) and (out,)."""
    return functional.linear(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Return ``input @ weight.T``; shapes (..., in) and (out, in)."""
    return functional.linear(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
) -> Tensor:
    """Return a linear layer of the GELU, as cuBLASLt computes it by tanh, of a linear layer.

    Args:
        input: shape (..., in).
        weight1, bias1: shapes (intermediate, in) and (intermediate,).
        weight2, bias2: shapes (out, intermediate) and (out,).
    """
    inner = functional.gelu(functional.linear(input, weight1, bias1), approximate="tanh")
    return functional.linear(inner, weight2, bias2)


class FusedDenseFunc:
    """What scripts call the apply of."""

    apply = forward = staticmethod(fused_dense_function)


class DenseNoBiasFunc:
    """What scripts call the apply of."""

    apply = forward = staticmethod(dense_no_bias_function)


class FusedDenseGeluDenseFunc:
    """What scripts call the apply of."""

    apply = forward = staticmethod(fused_dense_gelu_dense_function)


class FusedDense(nn.Module):
    """A linear layer with a weight of shape (out_features, in_features)."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.randn(out_features)) if bias else None)

    def forward(self, input: Tensor) -> Tensor:
        """Take (..., in_features) to (..., out_features)."""
        if self.bias is None:
            return dense_no_bias_function(input, self.weight)
        return fused_dense_function(input, self.weight, self.bias)


class DenseNoBias(FusedDense):
    """A linear layer without bias.

    Raises:
        ValueError: bias is not False.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        if bias:
            raise ValueError(
                f"DenseNoBias has no bias; got bias={bias!r}. Call FusedDense(in_features, "
                "out_features)."
            )
        super().__init__(in_features, out_features, bias=False)


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with GELU between them.

    Raises:
        ValueError: bias is not True.
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if not bias:
            raise ValueError(
                f"FusedDenseGeluDense needs biases; got bias={bias!r}. Call torch.nn.Sequential("
                "DenseNoBias(...), torch.nn.GELU(), DenseNoBias(...))."
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.weight1 = nn.Parameter(torch.randn(intermediate_features, in_features))
        self.bias1 = nn.Parameter(torch.randn(intermediate_features))
        self.weight2 = nn.Parameter(torch.randn(out_features, intermediate_features))
        self.bias2 = nn.Parameter(torch.randn(out_features))

    def forward(self, input: Tensor) -> Tensor:
        """Take (..., in_features) to (..., out_features)."""
        return fused_dense_gelu_dense_function(
            input, self.weight1, self.bias1, self.weight2, self.bias2
        )
