"""Data-parallel training under apex's names: over torch.distributed, on any backend and device."""

from torch.distributed import ReduceOp

from .distributed import DistributedDataParallel, Reducer
from .LARC import LARC
from .optimized_sync_batchnorm import SyncBatchNorm
from .sync_batchnorm import convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
