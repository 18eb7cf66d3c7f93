"""Parameters that come to an optimizer after `amp.initialize`, with gradients that they have.

Those that a block of `scale_loss` has written are multiplied by its scale: the parameter was in its
graph, and in no optimizer of it. Plain PyTorch adds the next backward to them, so they are
unscaled, once.
"""

from __future__ import annotations

from torch import Tensor

from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.scaled_gradients import by_scale
from amp_patch.weights.parameter_lists import listed, store_grad

from .held_params import HeldParams


class JoinedParams:
    """Takes over the gradients of parameters that have come to one optimizer.

    Args:
        held: its parameters.
        gradients: of these.
    """

    def __init__(self, held: HeldParams, gradients: Gradients) -> None:
        self._held, self._gradients = held, gradients

    def take_over(self) -> None:
        """Unscale their gradients, or bring them to the scale of others that wait for a block."""
        self._held.pairs()  # there may be others since the last look
        if not self._held.joined:
            return
        rows = (((param, master), scale) for param, master, scale in self._take())
        for scale, pairs in by_scale(rows):
            self._gradients.adopt(ParamPairs(*map(listed, zip(*pairs, strict=True))), scale)

    def leave_to_pass(self) -> None:
        """A block ends in which they have come: it unscales what they have with the rest."""
        for param, master, _ in self._take():
            if param is not master:
                store_grad(master, None)  # a new master has a copy

    def drop(self) -> None:
        """A block fails in which they have come: what its backward wrote to them is gone."""
        for param, master, _ in self._take():
            store_grad(param, None)
            store_grad(master, None)

    def _take(self) -> list[tuple[Tensor, Tensor, float | Tensor]]:
        if not self._held.joined:
            return []
        joined = self._held.take_joined()
        masters = {id(param): master for param, master in zip(*self._held.pairs(), strict=True)}
        return [
            (param, masters[id(param)], scale) for param, scale in joined if id(param) in masters
        ]
