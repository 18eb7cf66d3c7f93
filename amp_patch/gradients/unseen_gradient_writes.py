"""Writes to half gradients that move no version, as ``param.grad.data.zero_()`` makes them.

Knows parameters; no master, no optimizer and no loss scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.common.early_looks import EarlyLooks
from amp_patch.distributed.shards import local
from amp_patch.kernels.graph_capture import captures
from amp_patch.weights.half_bits import sum_of_bits


class UnseenGradientWrites:
    """Finds writes to gradients by ``grad.data``, which move no version; for some passes.

    Attributes:
        looks: the passes; with the last one nothing is noted any more.
        sums: what was noted, by the ids of parameters.
    """

    def __init__(self) -> None:
        self.looks = EarlyLooks()
        self.sums: dict[int, Tensor] = {}

    def note(self, params: Sequence[Tensor]) -> None:
        """These parameters have gradients as a pass leaves them."""
        self.sums.update(_sums(params))

    def written(self, params: Sequence[Tensor]) -> set[int]:
        """Return the ids of parameters to whose gradients somebody has written since."""
        known = {**self.sums}  # another thread may step meanwhile
        now = _sums([param for param in params if id(param) in known])
        if not now:
            return set()
        device = next(iter(now.values())).device  # which is waited for once
        moved = [(total - known[key]).to(device) for key, total in now.items()]
        return {key for key, by in zip(now, torch.stack(moved).tolist(), strict=True) if by}

    def forget(self) -> None:
        """The gradients of which something was noted were stepped or cleared."""
        self.sums.clear()
        self.looks.count()


@torch.no_grad()
def _sums(params: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return, for each parameter with a dense gradient in half, the sum of its bits as integers."""
    if not params or captures.are_made(params[0].device):
        return {}
    return {
        id(param): sum_of_bits(local(param.grad))
        for param in params
        if param.grad is not None and param.grad.itemsize == 2 and not param.grad.is_sparse
        if type(local(param.grad)) is Tensor  # the numbers of a user's class are its own affair
    }
