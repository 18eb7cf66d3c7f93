"""The place of apex's SGD of 2019; today's takes gradients as arguments, too."""

from ...optimizers.fused_sgd import FusedSGD

__all__ = ["FusedSGD"]
