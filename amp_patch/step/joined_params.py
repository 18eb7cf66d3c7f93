"""Parameters that come to an optimizer after `amp.initialize`, with gradients that they have.

Those that a block of `scale_loss` has written are multiplied by its scale: the parameter was in its
graph, and in no optimizer of it. Plain PyTorch adds the next backward to them, so they are
unscaled, once.
"""

from __future__ import annotations

from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.gradients.gradients import Gradients
from amp_patch.gradients.param_pairs import ParamPairs
from amp_patch.gradients.scaled_gradients import by_scale
from amp_patch.weights.parameter_lists import listed, store_grad, stored_grad

from .held_params import HeldParams, Joined


class JoinedParams:
    """Takes over the gradients of parameters that have come to one optimizer.

    Args:
        held: its parameters.
        gradients: of these.

    Attributes:
        kept: true gradients of parameters that have come in the block that ends, which it leaves
            as they are; empty but while it does.
    """

    def __init__(self, held: HeldParams, gradients: Gradients) -> None:
        self._held, self._gradients = held, gradients
        self.kept: list[tuple[Joined, Tensor | None]] = []

    def take_over(self) -> None:
        """Unscale their gradients, or bring them to the scale of others that wait for a block."""
        self._held.pairs()  # there may be others since the last look
        if not self._held.joined:
            return
        rows: list[tuple[tuple[Tensor, Tensor], Scale]] = []
        for row, master in self._take():
            if row.had_grad and stored_grad(row.param) is None and master is not row.param:
                store_grad(master, None)  # a script has cleared what it has a copy of
            rows.append(((row.param, master), row.scale))
        for scale, pairs in by_scale(rows):
            self._gradients.adopt(ParamPairs(*map(listed, zip(*pairs, strict=True))), scale)

    def leave_to_pass(self) -> None:
        """A block ends in which they have come: it unscales what they have with the rest.

        True gradients that it has kept so are none of its own, until `end_pass`.
        """
        for row, master in self._take():
            param = row.param
            if param is not master:
                store_grad(master, None)  # a new master has a copy
            if row.true is not None and row.true.has(param):
                self.kept.append((row, stored_grad(param)))
                store_grad(param, None)

    def end_pass(self) -> None:
        """The block is over: its true gradients are taken over by whoever asks for them next."""
        kept, self.kept = self.kept, []
        for row, grad in kept:
            store_grad(row.param, grad)
            self._held.joined.append(row._replace(true=None))

    def drop(self) -> None:
        """A block fails in which they have come: what its backward wrote to them is gone."""
        for row, master in self._take():
            if master is not row.param:
                store_grad(master, None)
            if row.true is not None and row.true.is_as_it_was(row.param):
                self._held.joined.append(row._replace(true=None))
            else:
                store_grad(row.param, None)

    def _take(self) -> list[tuple[Joined, Tensor]]:
        """Return those that are held still, each with its master."""
        if not self._held.joined:
            return []
        held = set(map(id, self._held.pairs().model))
        rows = [row for row in self._held.take_joined() if id(row.param) in held]
        masters = self._held.with_masters([row.param for row in rows]).master
        return list(zip(rows, masters, strict=True))
