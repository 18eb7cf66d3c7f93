"""The place of apex's LAMB of 2019, which was that of today."""

from ...optimizers.fused_lamb import FusedLAMB

__all__ = ["FusedLAMB"]
