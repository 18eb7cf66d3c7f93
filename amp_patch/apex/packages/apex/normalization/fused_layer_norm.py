"""Modules of layer norm and RMS norm, which take any mix of dtypes; apex's place of both."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .norm_functions import (
    Shape,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    layer_norm,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
    output_dtype,
    rms_norm,
    size,
)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


class FusedLayerNormAffineFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction:
    """What scripts call the apply of; some look for arguments of its forward."""

    apply = forward = staticmethod(fused_rms_norm)


class _Norm(nn.Module):
    """The settings and the affine parameters that all norms here have."""

    _affine: ClassVar[tuple[str, ...]] = ("weight",)
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = size(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._affine:
            empty = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
            self.register_parameter(name, empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias, where there is one, to 0."""
        for name, param in self.named_parameters(recurse=False):
            nn.init.constant_(param, float(name == "weight"))

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        affine = f"elementwise_affine={self.elementwise_affine}"
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, {affine}"

    def _like(self, input: Tensor) -> Tensor:
        """Return the tensor whose dtype the output has."""
        return input


class FusedLayerNorm(_Norm):
    """Layer norm; the output has the input's dtype.

    Args:
        normalized_shape: the last dimensions of the input, (..., *normalized_shape).
        eps: added to the variance.
        elementwise_affine: whether to have a weight, first 1, and a bias, first 0, both of shape
            normalized_shape.
        memory_efficient: no effect.
    """

    _affine = ("weight", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of any floating dtype."""
        output = layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return output.to(output_dtype(self._like(input)))


class FusedRMSNorm(_Norm):
    """RMS norm; the output has the input's dtype.

    Args:
        normalized_shape, eps, memory_efficient: as `FusedLayerNorm`.
        elementwise_affine: whether to have a weight, first 1, of shape normalized_shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of any floating dtype."""
        output = rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return output.to(output_dtype(self._like(input)))


class _Mixed(_Norm):
    """Gives the output the weight's dtype."""

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        if kwargs.keys() - {"elementwise_affine"}:
            raise TypeError(
                f"{name} takes normalized_shape, eps and memory_efficient; got "
                f"{', '.join(sorted(kwargs))} as well. Call {name}(normalized_shape, eps)."
            )
        if not kwargs.get("elementwise_affine", True):
            raise RuntimeError(
                f"{name} needs a weight, whose dtype its output has; got elementwise_affine=False. "
                f"Call {name.removeprefix('Mixed')}(normalized_shape, elementwise_affine=False)."
            )
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def _like(self, input: Tensor) -> Tensor:
        return self.weight


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """Layer norm; the output has the weight's dtype.

    Args:
        normalized_shape, eps, memory_efficient: as `FusedLayerNorm`.
        kwargs: elementwise_affine, which must be True.

    Raises:
        RuntimeError: elementwise_affine is False.
    """


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """RMS norm; the output has the weight's dtype.

    Args:
        normalized_shape, eps, memory_efficient: as `FusedLayerNorm`.
        kwargs: elementwise_affine, which must be True.

    Raises:
        RuntimeError: elementwise_affine is False.
    """
