"""Parameters that leave an optimizer, with gradients that they have.

Plain PyTorch leaves these where they are: for another optimizer, or for the time when the
parameters come back. What the optimizer alone knows of them goes into them, or is handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.gradients.foreign_gradients import ForeignGradients
from amp_patch.gradients.gradients import Gradients
from amp_patch.weights.parameter_lists import clear_grads

from .current_pass import CurrentPass
from .held_params import HeldParams
from .skip import Skip


class PartedParams:
    """Lets go of parameters that one optimizer holds no more.

    Args:
        held: the others.
        gradients: of its parameters.
        foreign: those of them that came of other optimizers' blocks.
        current: the pass that it is in.
        skip: whether its next step is skipped.
    """

    def __init__(
        self,
        held: HeldParams,
        gradients: Gradients,
        foreign: ForeignGradients,
        current: CurrentPass,
        skip: Skip,
    ) -> None:
        self._held, self._gradients = held, gradients
        self._foreign, self._current, self._skip = foreign, current, skip

    def let_go(self, gone: Sequence[Tensor]) -> list[tuple[Tensor, Scale]]:
        """See `LetGo`; what has overflowed is gone, as after a skipped step.

        Raises:
            FloatingPointError: of a check that was pending. Nobody is let go: call it again.
        """
        if self._skip.pending:
            self._skip.settle()
        is_skipped = self._skip.found()
        waiting, gone = self._joined(gone)
        pairs = self._held.with_masters(gone)
        rest = chain(self._held.pairs().model, self._gradients.elsewhere)
        scale = None if is_skipped else self._current.scale
        found = [*waiting, *self._foreign.let_go(gone)]
        left = self._gradients.parted.let_go(pairs, rest, scale)
        if is_skipped:
            clear_grads([*pairs.model, *pairs.master])
            return found
        return [*found, *left]

    def _joined(self, gone: Sequence[Tensor]) -> tuple[list[tuple[Tensor, Scale]], list[Tensor]]:
        """Return those that have come lately, with what they came with, and the others."""
        ids = set(map(id, gone))
        came = [row for row in self._held.joined if id(row.param) in ids]
        self._held.joined = [row for row in self._held.joined if id(row.param) not in ids]
        copied = self._held.with_masters([row.param for row in came])
        clear_grads(master for _, master in copied.halves())
        others = ids.difference(id(row.param) for row in came)
        return [row[:2] for row in came], [param for param in gone if id(param) in others]
