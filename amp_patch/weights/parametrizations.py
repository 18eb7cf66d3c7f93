"""Finds what computes weights of layers (torch.nn.utils.parametrize); knows nothing of precision.

Linear algebra makes most such weights: an orthogonal one, an inverse, one divided by its largest
singular value. torch has few half kernels for it, and half numbers would not do. So a model in half
keeps in fp32 what a weight is computed from, as it does batch norms, and the layer gets the weight
in half.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def weights_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer that has such weights, with the module that computes one."""
    for layer in model.modules():
        if is_parametrized(layer):
            for weight in layer.get_submodule("parametrizations").children():
                yield layer, weight


def modules_of(model: nn.Module) -> set[nn.Module]:
    """Return all modules that take part in computing weights."""
    return {module for _, weight in weights_of(model) for module in weight.modules()}
