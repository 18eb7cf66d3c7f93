"""Where one rank alone finds an overflow: in gradients that no engine shares.

In a model that each rank has for itself it would let the ranks scale the losses of a model that
they share by different numbers, and train that apart without a word. So it is with parameters of
one rank that an optimizer steps beside those that ranks share, as experts or the part of a large
last layer. A script that shares the gradients by hand after the block brings it to ranks that have
found none. Knows what was prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from amp_patch.common.warn_once import warn_once
from amp_patch.step.optimizer_step import OptimizerStep


class ScaleUsers:
    """Whether the optimizers that use a scaler are shared by ranks; where there are several ranks.

    Args:
        averaged_among: returns those of some parameters whose gradients `DistributedDataParallel`
            averages.
    """

    def __init__(self, averaged_among: Callable[[Iterable[Tensor]], list[Tensor]]) -> None:
        self._averaged_among = averaged_among
        self._found: dict[int, set[bool]] = {}

    def note(self, steps: Iterable[OptimizerStep], scaler_id: int, is_moved: bool) -> None:
        """Optimizers use a scaler together; warn where it moves and is of both kinds."""
        found = self._found.setdefault(scaler_id, set())
        backwards = [step.backward for step in steps]
        # What is found in the gradients of one is agreed upon with what is found in the others'.
        are_agreed = any(one.ranks.groups for one in backwards)
        for one in backwards:
            averaged = self._averaged_among(one.pairs().model)
            is_shared = bool(one.ranks.groups or averaged)
            one.decides_alone = not is_shared
            found.add(is_shared or are_agreed)
            if is_moved and averaged and not are_agreed:
                self._look_for_lone(one.pairs().model, averaged)
        if is_moved and len(found) > 1:
            warn_once(
                "a loss scale must move alike on all ranks that share a model; got one for both a "
                "model that ranks share and one that this rank has alone, whose overflows no other "
                "rank sees. Call amp.initialize(..., num_losses=2) and amp.scale_loss(loss, "
                "optimizer, loss_id=1) for one of them; or wrap both in DistributedDataParallel."
            )

    def _look_for_lone(self, params: Iterable[Tensor], averaged: Iterable[Tensor]) -> None:
        """Warn where an optimizer steps parameters of this rank alone beside averaged ones."""
        shared = set(map(id, averaged))
        count = sum(param.requires_grad and id(param) not in shared for param in params)
        if count:
            warn_once(
                "an optimizer must make each step on all ranks that share a model, or on none; got "
                f"one of parameters that DistributedDataParallel averages and of {count} that it "
                "does not, whose overflows no other rank sees. Call amp.initialize(..., "
                "process_group=torch.distributed.group.WORLD), or wrap in DistributedDataParallel "
                "what all ranks train alike."
            )
