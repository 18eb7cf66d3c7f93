"""Which gradients are there and not 0, of many at once: a device is waited for once.

Nothing but 0 is what a script leaves that clears in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.distributed.shards import local
from amp_patch.kernels import values
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.tensor_values import is_any


def are_any(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return of each gradient whether it is there and not 0; of one that is captured, True."""
    found = [grad is not None for grad in grads]
    asked = [
        (row, is_any(values(local(grad))))
        for row, grad in enumerate(grads)
        if grad is not None and not captures.are_made(grad.device)
    ]
    if asked:
        device = asked[0][1].device
        read = torch.stack([flag.to(device) for _, flag in asked]).tolist()
        for (row, _), is_there in zip(asked, read, strict=True):
            found[row] = is_there
    return found
