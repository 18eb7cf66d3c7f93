"""Half gradients that a script has put in the place of those that masters have received.

In plain PyTorch such a one is stepped: adversarial training (PGD) gives parameters back the
gradients that it has saved. Knows no scale; what may be multiplied by one is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from amp_patch.kernels.getters import GRAD
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import look_up, stored_grad

from .param_pairs import ParamPairs
from .received_gradients import Changes, ReceivedGradients
from .used_gradients import UsedGradients


class ReplacedGradients:
    """Finds them, where nothing says that the script means others.

    Args:
        lazy: what keeps the masters' gradients until they are read, and leaves half ones scaled;
            None: all are true.
        received: what masters have received.
        used: half gradients that the step is to use, or has used.

    Attributes:
        had_another_block: whether a block of another optimizer has come since the last step, which
            may have written scaled gradients.
        read: what tells the masters' gradients, as a script has read them since they were received,
            and as a clip has left them since.
    """

    def __init__(
        self, lazy: LazyGradients | None, received: ReceivedGradients, used: UsedGradients
    ) -> None:
        self._lazy, self._received, self._used = lazy, received, used
        self.had_another_block = False
        self.read: list[tuple[int, int, int]] = []

    def note_read(self, masters: list[Tensor]) -> None:
        """A script reads the gradients of these, and may write to them."""
        self.read = _versions(masters)

    def note_clipped(self, masters: list[Tensor]) -> None:
        """The gradients of these were clipped, which half ones follow: that is no write."""
        if self.read:
            clipped = set(map(id, masters))
            others = [one for one in self.read if one[0] not in clipped]
            self.read = others + _versions(masters)

    def found(self, pairs: ParamPairs, changes: Changes, free: Iterable[Tensor]) -> ParamPairs:
        """Return the parameters of which masters are to get what a script has given them.

        Those of replaced gradients, where none are left scaled, and those that no pass has reached.
        None where the script has written to the masters' that it has read. What has a graph is the
        sum of a backward, of another's block perhaps.

        Args:
            pairs: of the optimizer.
            changes: what was done to gradients that masters have received.
            free: masters that have no gradient that a script has given them.
        """
        if self.had_another_block:
            return ParamPairs([], [])
        if self.read and set(self.read) != set(_versions(pairs.master)):
            return ParamPairs([], [])
        replaced = set(map(id, changes.given.model)) if self._lazy is None else set()
        reached = set(map(id, self._received.params()))
        used = set(map(id, self._used.alive()))
        may_get = set(map(id, free))
        rows = []
        for param, master in pairs.halves():
            grad = stored_grad(param)
            is_late = id(param) not in reached and id(grad) not in used
            is_late = is_late and stored_grad(master) is None
            is_given = id(param) in replaced and id(master) in may_get
            if grad is not None and not grad.requires_grad and (is_given or is_late):
                rows.append((param, master))
        return ParamPairs.of(rows)


def _versions(masters: list[Tensor]) -> list[tuple[int, int, int]]:
    """Return what tells the gradients of masters from others, and from written ones."""
    grads = zip(masters, look_up(GRAD, masters), strict=True)
    return [(id(one), id(grad), grad._version) for one, grad in grads if grad is not None]
