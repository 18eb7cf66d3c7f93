"""Optimizers: the one that torch lacks, `FusedLAMB`, and the fused steps of those that it has."""

from .lamb import FusedLAMB

__all__ = ["FusedLAMB"]
