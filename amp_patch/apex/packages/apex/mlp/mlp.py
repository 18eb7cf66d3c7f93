"""Linear layers in a row, with one activation after each; over torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

_NUMBERS = {"none": 0, "relu": 1, "sigmoid": 2}
_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (nn.Identity(), torch.relu, torch.sigmoid)


def mlp_function(bias: bool, activation: int, *args: Tensor) -> Tensor:
    """Run linear layers, and the activation after every one of them, the last as well.

    Args:
        bias: whether biases are among args.
        activation: 0 for none, 1 for relu, 2 for sigmoid.
        args: the input, shape (batch, in); then the weights, each (out, in); then the biases.
    """
    output, *params = args
    count = len(params) // 2 if bias else len(params)
    biases = params[count:] if bias else [None] * count
    for weight, one in zip(params[:count], biases, strict=True):
        output = _FUNCTIONS[activation](functional.linear(output, weight, one))
    return output


class MlpFunction:
    """What scripts call the apply of."""

    apply = forward = staticmethod(mlp_function)


class MLP(nn.Module):
    """Linear layers in a row, with an activation after every one, the last as well.

    Args:
        mlp_sizes: features of the input and of each layer's output, such as [480, 1024, 1].
        bias: whether the layers have biases.
        activation: 'none', 'relu' or 'sigmoid'.

    Attributes:
        num_layers: how many layers.
        weights, biases: the parameters weight_0, weight_1, ... and bias_0, ... in lists.
        activation: 0, 1 or 2, in the order above.

    Raises:
        TypeError: activation is none of the three.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu"
    ) -> None:
        super().__init__()
        if activation not in _NUMBERS:
            raise TypeError(
                f"activation must be 'none', 'relu' or 'sigmoid'; got {activation!r}. Call "
                "MLP(mlp_sizes, activation='none') and put your own function around it."
            )
        self.mlp_sizes = mlp_sizes
        self.num_layers = len(mlp_sizes) - 1
        self.bias = bias
        self.activation = _NUMBERS[activation]
        for index in range(self.num_layers):
            fan_in, fan_out = mlp_sizes[index], mlp_sizes[index + 1]
            self.register_parameter(f"weight_{index}", nn.Parameter(torch.empty(fan_out, fan_in)))
            if bias:
                self.register_parameter(f"bias_{index}", nn.Parameter(torch.empty(fan_out)))
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights in order."""
        return [getattr(self, f"weight_{index}") for index in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The biases in order; empty without."""
        return [getattr(self, f"bias_{index}") for index in range(self.num_layers * self.bias)]

    def reset_parameters(self) -> None:
        """Draw weights from normal(0, 2 / (in + out)) and biases from normal(0, 1 / out)."""
        for weight in self.weights:
            nn.init.xavier_normal_(weight)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, bias.numel() ** -0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Run the layers on an input of shape (batch, mlp_sizes[0])."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
