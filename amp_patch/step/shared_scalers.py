"""Which of the loss scalers of a process each loss of an optimizer uses.

Knows what was set up for optimizers by this alone; how a scale moves is `loss_scaler`'s.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

from .optimizer_step import OptimizerStep


class SharedScalers:
    """The loss scalers of a process; losses of several calls of `initialize` may share one.

    Args:
        every: the list of the process, changed here; a loss_id of an optimizer points into it.
        steps: what was set up for each optimizer that lives.
    """

    def __init__(self, every: list[LossScaler], steps: Mapping[Optimizer, OptimizerStep]) -> None:
        self._every, self._steps = every, steps

    def assign(
        self, rule: ScaleRule, num_losses: int, on_error: contextlib.ExitStack
    ) -> dict[int, int]:
        """Return loss_id -> index in the list of scalers for the optimizers of one call.

        A scaler in use by a living optimizer is shared where its rule is the same and not reset;
        where the rule differs the call gets one of its own at the end of the list. A scale that is
        lost begins anew: what diverged before, and lives on in a traceback or a scheduler, would
        leave it to this call.

        Args:
            rule: of each of the call's losses.
            num_losses: how many there are.
            on_error: gets what undoes it.
        """
        scalers = self._every
        on_error.callback(self._set, list(scalers))
        in_use = {index for mapping in self._mappings() for index in mapping.values()}
        del scalers[max(in_use, default=-1) + 1 :]
        assigned: dict[int, int] = {}
        for loss_id in range(num_losses):
            index = loss_id
            shared = index in in_use and scalers[index].rule == rule
            taken = index in in_use or index in assigned.values()
            if index >= len(scalers) or (taken and not shared):
                index = len(scalers)
                scalers.append(LossScaler(rule))
            elif not shared or scalers[index].is_lost():
                scalers[index] = LossScaler(rule)
            assigned[loss_id] = index
        return assigned

    def index_of(self, step: OptimizerStep, loss_id: Any) -> int:
        """Return the index of the scaler of an optimizer's loss.

        Raises:
            TypeError, IndexError: no such loss.
        """
        number = loss_id if isinstance(loss_id, int) else self.check(loss_id)
        return step.scalers[number] if number in step.scalers else self.check(number)

    def check(self, index: Any) -> int:
        """Return ``index``, perhaps NumPy's, as an int if the list of scalers has it.

        Raises:
            TypeError: it is no int.
            IndexError: there is no such scaler.
        """
        try:
            number: int = index if isinstance(index, bool) else operator.index(index)
        except TypeError:
            raise TypeError(
                f"loss_id must be an int, the number of a loss; got {type(index).__name__}; "
                "call amp.scale_loss(loss, optimizer, loss_id=0), or amp.loss_scale(loss_id=0)."
            ) from None
        count = len(self._every)
        if not 0 <= number < count:
            mend = f"initialize(..., num_losses={number + 1})"
            if number < 0:  # the last, as a list would have it
                mend = f"scale_loss(loss, optimizer, loss_id={count - 1})"
            elif isinstance(number, bool):  # the third argument
                mend = f"scale_loss(loss, optimizer, delay_unscale={number})"
            raise IndexError(
                f"loss_id must be at least 0 and below the number of losses ({count}); got "
                f"{number}; call amp.{mend}."
            )
        return number

    def of(self, indices: Mapping[int, int]) -> list[LossScaler]:
        """Return the scalers of an optimizer's losses, by loss_id -> index as `assign` returns."""
        return [self._every[index] for index in indices.values()]

    @property
    def scale_losses(self) -> bool:
        """True where a loss may be multiplied by another number than 1."""
        return not all(one.is_one for one in self._every)

    def calls_with(self, index: int) -> int:
        """Return how many calls of `initialize` have living optimizers that use a scaler."""
        return sum(index in mapping.values() for mapping in self._mappings())

    def put_first(
        self,
        scalers: Sequence[LossScaler],
        instead: Callable[[int, int, LossScaler], LossScaler],
    ) -> None:
        """Put scalers at the head of the process's list, and say which of them losses use.

        After them come the others that losses go on using; what no loss uses is dropped.

        Args:
            scalers: at their positions, loss_ids that an optimizer has none of its own for.
            instead: (loss_id, position in the list, scaler) of a loss of an optimizer -> the
                scaler that it uses from now on.
        """
        before = list(self._every)
        self._set(scalers)
        for mapping in self._mappings():
            for loss_id, index in mapping.items():
                scaler = instead(loss_id, index, before[index])
                if scaler not in self._every:
                    self._every.append(scaler)
                mapping[loss_id] = self._every.index(scaler)

    def _mappings(self) -> list[dict[int, int]]:
        """Return loss_id -> index for each call of `initialize`; its optimizers have one object."""
        known = {id(step.scalers): step.scalers for step in list(self._steps.values())}
        return list(known.values())

    def _set(self, scalers: Sequence[LossScaler]) -> None:
        self._every[:] = scalers
