"""What stands around each backward of a session: who scales its loss, checks it, and looks on.

Knows what was prepared and who looks out for mistakes; `BackwardPass` does the work.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from .casting.mode import mode
from .casting.running_modules import running_modules
from .casting.weight_cache import WeightCache
from .common.warn_once import warn_once
from .distributed.agreement import require_alike
from .distributed.process_groups import has_others
from .mistakes.guard import Guard
from .scaling.loss_scaler import LossScaler
from .step.backward_pass import BackwardPass, Other
from .step.loss_scaling import Found, HostScaling, LossScaling, NoScaling, choose_scaling
from .step.observers import Observers
from .step.optimizer_step import OptimizerStep, is_stepping
from .step.overflow_log import OverflowLog
from .step.prepared_optimizers import PreparedOptimizers
from .weights import module_rules as rules_of_modules
from .weights.prepared_models import PreparedModels


class BackwardPasses:
    """Makes the `BackwardPass` of each scaled loss.

    Args:
        scalers: one list per process; a loss_id of an optimizer points into it.
        models, optimizers, cache: of the session.
        guard: looks out for mistakes.
        observers: told of each pass and each overflow.
        prints: whether skipped steps are told.

    Attributes:
        overflows: the last one of each scaler.
    """

    def __init__(
        self,
        scalers: Sequence[LossScaler],
        models: PreparedModels,
        optimizers: PreparedOptimizers,
        cache: WeightCache,
        guard: Guard,
        observers: Observers,
        prints: Callable[[], bool],
    ) -> None:
        self._scalers, self._models, self._optimizers = scalers, models, optimizers
        self._cache, self._guard, self._observers = cache, guard, observers
        self._prints = prints
        self._host_scalings: dict[int, HostScaling] = {}
        self.overflows = OverflowLog()

    def no_scaling(
        self, steps: Sequence[OptimizerStep], loss_id: Any, device: torch.device
    ) -> NoScaling | None:
        """Return what counts a backward pass that needs nothing else; None where one may.

        That is at a scale of 1 without masters (O0, O3, O4), where nobody looks on. Arguments and
        errors are `of_loss`'s.
        """
        if not all(map(_TAKES_GRADS_AS_THEY_ARE, steps)):  # at once, where there are masters
            return None
        scaler = self._scalers[self._optimizers.scalers.index_of(steps[0], loss_id)]
        if (
            not scaler.is_one
            or self._guard.unprepared
            or self._guard.unsynced.has_new
            or self._observers
            or mode.modules
            or mode.models
            or mode.off
        ):
            return None
        for other in self._optimizers.others(steps):
            other.expect_foreign()
        return NoScaling(scaler, device)

    def of_loss(
        self,
        steps: Sequence[OptimizerStep],
        loss_id: Any,
        device: torch.device,
        may_be_delayed: bool = False,
    ) -> BackwardPass:
        """Return the hooks of one backward pass, see `BackwardPass`.

        Args:
            steps: of the optimizers whose gradients the backward writes.
            loss_id: which of their losses it is.
            device: the loss's.
            may_be_delayed: whether the check may wait until the step.

        Raises:
            TypeError, IndexError: no such loss.
        """
        # an interrupt ended a forward, or the end of a step, and training goes on
        if mode.modules or mode.models or mode.off:
            running = running_modules()
            rules_of_modules.leave_but(running)
            mode.leave_models_but(running, is_stepping())
        scaler_id = self._optimizers.scalers.index_of(steps[0], loss_id)
        if steps[0].backward.zeroing.is_watched and has_others():
            is_moved = self._scalers[scaler_id].rule.dynamic
            self._guard.scale_users.note(steps, scaler_id, is_moved)
        return self.under(steps, scaler_id, self.scaling(steps, scaler_id, device, may_be_delayed))

    def scaling(
        self,
        steps: Sequence[OptimizerStep],
        scaler_id: int,
        device: torch.device,
        may_be_delayed: bool,
    ) -> LossScaling:
        """Return who scales a loss of these optimizers on a device."""
        for step in steps:
            if step.skip.pending:
                step.skip.settle()
        scaler, on_host = self._scalers[scaler_id], self._host_scalings.get(scaler_id)
        if on_host is None or on_host.scaler is not scaler:
            names, on_overflow = self._models.names, self._note_overflow
            on_host = HostScaling(scaler, scaler_id, names, on_overflow, self._prints)
            self._host_scalings[scaler_id] = on_host
        return choose_scaling(
            on_host,
            device,
            may_be_delayed or self._observers.wait_for_overflows,
            can_skip=lambda: all(step.backward.skips_by_flag for step in steps),
        )

    def under(
        self, steps: Sequence[OptimizerStep], scaler_id: int, scaling: LossScaling
    ) -> BackwardPass:
        """Return the hooks of a backward pass whose loss is scaled so; arguments as `scaling`'s.

        Raises:
            RuntimeError: ranks that share a model do not begin alike.
        """
        if self._guard.unsynced.has_new:
            self._compare_ranks(steps, self._scalers[scaler_id])
        optimizers = [step.backward for step in steps]
        if scaling.is_on:
            for backward in optimizers:
                backward.pairs()  # one that has left them is looked at with the unprepared ones
        others: list[Other] = [*self._optimizers.others(steps)]
        if self._guard.unprepared:
            others.append(self._guard.unprepared)
        on_scaled = None
        if self._observers:
            stepped = [one for step in steps if (one := step.optimizer) is not None]
            on_scaled = functools.partial(self._observers.scaled, scaler_id, stepped)
        unsynced, open_block = self._guard.unsynced or None, self._guard.open_block
        return BackwardPass(
            optimizers, others, scaling, self._cache, on_scaled, unsynced, open_block
        )

    def _compare_ranks(self, steps: Sequence[OptimizerStep], scaler: LossScaler) -> None:
        """Compare, once for each wrapper, what nothing tells of later: what the ranks have.

        Raises:
            RuntimeError: it is not the same.
        """
        params = chain.from_iterable(step.backward.params() for step in steps)
        for wrapper in self._guard.unsynced.take_new(params, self._optimizers.params()):
            dtypes = sorted({str(param.dtype) for param in wrapper.parameters()})
            # a scale that never moves needs no count
            count = f" for {scaler.unskipped} steps" if scaler.rule.dynamic else ""
            require_alike(
                wrapper,
                f"loss scale {scaler.loss_scale()}{count}, parameters in {' and '.join(dtypes)}",
            )

    def _note_overflow(
        self, scaler_id: int, found: Sequence[Found], scale: float, step: int
    ) -> None:
        self.overflows.note(scaler_id, scale, step, found, self._models.names())
        self._observers.overflowed(scaler_id, found)
        is_low = scale <= 1.0 and self._scalers[scaler_id].rule.dynamic
        if is_low and self._optimizers.scalers.calls_with(scaler_id) > 1:
            warn_once(
                "trainings that share a loss scale must find one that suits all of them; got "
                "overflows down to a scale of 1 in one of several that share loss scaler "
                f"{scaler_id}, and below it the gradients of the others become 0. Give each a "
                "rule, and so a scale, of its own: amp.initialize(..., growth_interval=2001). Or "
                "call amp.initialize(..., opt_level='O4'), which needs no scale."
            )


#: Looked up for each optimizer of a loss by `map`, which calls no Python.
_TAKES_GRADS_AS_THEY_ARE = operator.attrgetter("backward.takes_grads_as_they_are")
