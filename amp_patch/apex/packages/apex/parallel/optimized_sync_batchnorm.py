"""The other name of the module `sync_batchnorm`."""

from .sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
