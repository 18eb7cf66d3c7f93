"""The initialized optimizers, and which loss scaler each of their losses uses.

Knows no model; what an optimizer's step does is `optimizer_step`'s, how a scale moves is
`loss_scaler`'s.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.casting.mode import HALVES
from amp_patch.distributed.engines import is_zero, local_optimizer
from amp_patch.distributed.groups import StepRanks
from amp_patch.distributed.shards import any_spread
from amp_patch.levels import OptLevel
from amp_patch.optimizers.groups import params_of
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.warn_once import warn_once
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.master_weights import MasterWeights

from .observers import Observers
from .optimizer_backward import OptimizerBackward
from .optimizer_step import OptimizerStep
from .skip import Pending


class PreparedOptimizers:
    """What was set up for each optimizer; both go when the user drops the optimizer.

    Args:
        scalers: the list of the process, extended here; a loss_id of an optimizer points into it.
        announce: gets the message of each skipped step.
        observers: told of each step.

    Attributes:
        steps: what was set up for each optimizer, held weakly.
        running: those of them that are stepping, without a closure.
    """

    def __init__(
        self, scalers: list[LossScaler], announce: Callable[[str], None], observers: Observers
    ) -> None:
        self._scalers = scalers
        self._announce, self._observers = announce, observers
        self.steps: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = (
            weakref.WeakKeyDictionary()
        )
        self.running: list[OptimizerStep] = []
        # Each forward asks for them: a list is read in a quarter of the time of a weak dict.
        self._masters: list[weakref.ref[MasterWeights]] = []
        self._steps: list[weakref.ref[OptimizerStep]] = []  # likewise, for each pass

    def set_up(
        self,
        optimizers: Iterable[Optimizer],
        level: OptLevel,
        store: FP32Values,
        scale_rule: ScaleRule,
        num_losses: int,
        fused_step: bool,
        ranks: Callable[[Optimizer, bool], StepRanks | None],
        on_error: contextlib.ExitStack,
    ) -> None:
        """Patch the steps of the optimizers of one call, which share its loss scalers.

        Args:
            optimizers: none of them set up before. Of a `ZeroRedundancyOptimizer` that is to step
                masters it is the local optimizer that is set up.
            level: says whether they step masters, and whether the models were cast.
            store: where the masters' fp32 values come from.
            scale_rule: of each of the call's losses.
            num_losses: how many there are.
            fused_step: whether the optimizers step by `FusedStep`, which needs masters.
            ranks: returns those that step together with an optimizer, see `ranks_given`.
            on_error: gets what undoes it.
        """
        on_error.callback(self._set_scalers, list(self._scalers))
        scaler_ids = self._assign_scalers(scale_rule, num_losses)
        for given in optimizers:
            optimizer = local_optimizer(given) if level.master_weights else given
            masters_from = store if level.master_weights else None
            together = ranks(given, optimizer is not given)
            step = OptimizerStep(
                optimizer,
                masters_from,
                scaler_ids,
                self._announce,
                self._observers,
                self.running,
                fused=fused_step and _has_dense_parts(optimizer),
                ranks=together,
                steps_halves=not level.casts_functions or _trains_halves(optimizer),
            )
            is_scaled = scale_rule.dynamic or scale_rule.init_scale != 1.0
            if is_scaled:
                step.was_scaled = self._was_scaled
            if is_zero(given) and (is_scaled or level.master_weights):
                step.refuse_join(given)
            on_error.callback(step.release)
            self.steps[optimizer] = step
            on_error.callback(self.steps.pop, optimizer, None)
            reference = weakref.ref(step, self._forget_step)
            self._steps.append(reference)
            on_error.callback(self._forget_step, reference)
            if step.masters is not None:
                self._masters.append(weakref.ref(step.masters, self._masters.remove))
            if optimizer is not given:
                step.follow_zero(given, store)
            else:
                self._follow_given(step, given, together, level)
            if level.cast_model_type in HALVES:
                step.state.match()

    @staticmethod
    def _follow_given(
        step: OptimizerStep, given: Optimizer, together: StepRanks | None, level: OptLevel
    ) -> None:
        """An optimizer was set up that is stepped itself, and not by a wrapper."""
        if level.casts_functions or level.stores_half:
            step.fuse_by_default(given)
        if together is not None and together.have_parts:
            step.state.save_masters(given)

    def _forget_step(self, reference: weakref.ref[OptimizerStep]) -> None:
        """One is gone, or is not set up after all; then it is gone later, too."""
        if reference in self._steps:
            self._steps.remove(reference)

    def steps_of(self, optimizers: Any) -> list[OptimizerStep]:
        """Return what was set up for one, or each of a list or tuple; nothing if not for all."""
        if isinstance(optimizers, Optimizer):
            step = self.steps.get(optimizers)
            return [] if step is None else [step]
        found: list[OptimizerStep] = []
        for one in optimizers if isinstance(optimizers, (list, tuple)) else ():
            step = self.steps.get(one) if isinstance(one, Optimizer) else None
            if step is None:
                return []
            if step not in found:
                found.append(step)
        return found

    def show_writes(self) -> None:
        """A forward comes next; see `MasterWeights.show_writes`."""
        for reference in [*self._masters]:
            masters = reference()
            if masters is not None:
                masters.show_writes()

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        for step in list(self.steps.values()):
            masters = step.masters
            if masters is not None and (param := masters.param_of(stepped)) is not stepped:
                return param
        return stepped

    def _was_scaled(self, step: OptimizerStep) -> bool:
        """Return whether a loss was scaled for an optimizer, or one that shares its parameters.

        A script that scales it by hand is believed.
        """
        if any(self._scalers[index].is_by_hand for index in step.scalers.values()):
            return True
        own = set(map(id, step.backward.pairs().model))
        return any(
            other.backward.zeroing.has_written
            and not own.isdisjoint(map(id, other.backward.pairs().model))
            for other in list(self.steps.values())
        )

    @property
    def scale_losses(self) -> bool:
        """True where a loss may be multiplied by another number than 1."""
        return any(one.rule.dynamic or one.scale != 1.0 for one in self._scalers)

    def calls_with(self, scaler_id: int) -> int:
        """Return how many calls of `initialize` have living optimizers that use a scaler."""
        mappings = {id(step.scalers): step.scalers for step in list(self.steps.values())}
        return sum(scaler_id in mapping.values() for mapping in mappings.values())

    @property
    def have_shares(self) -> bool:
        """True where an optimizer has masters of this rank's share alone."""
        return any(step.groups.are_own for step in self.steps.values())

    def originals_of(self, optimizers: Any) -> Any:
        """Return the optimizers that are set up in the place of what wraps or copies them.

        Frameworks do either; that the ``param_groups`` are the same list tells whose they are.

        Args:
            optimizers: one, or a list or tuple. Others in it are returned as they are.
        """
        if isinstance(optimizers, (list, tuple)):
            originals = [self.originals_of(optimizer) for optimizer in optimizers]
            return originals if isinstance(optimizers, list) else tuple(originals)
        if isinstance(optimizers, Optimizer) and is_zero(optimizers):
            local = local_optimizer(optimizers)
            return local if local in self.steps else optimizers
        groups = getattr(optimizers, "param_groups", None)
        if groups is None or (isinstance(optimizers, Optimizer) and optimizers in self.steps):
            return optimizers
        return next((known for known in self.steps if known.param_groups is groups), optimizers)

    def match_state(self) -> None:
        """Bring the optimizers' state to the dtypes of their parameters, which were cast."""
        for step in list(self.steps.values()):
            step.state.match()

    def release(self) -> None:
        """Undo it: every optimizer steps its own parameters again, state kept."""
        for step in list(self.steps.values()):
            step.release()

    def others(self, steps: Sequence[OptimizerStep]) -> list[OptimizerBackward]:
        """Return what all but these do around a backward."""
        if len(self._steps) == len(steps):
            return []
        every = [reference() for reference in self._steps]
        return [step.backward for step in every if step is not None and step not in steps]

    def settle(self) -> None:
        """Finish every check that ``delay_overflow_check`` left open."""
        for step in list(self.steps.values()):
            step.skip.settle()

    def scaled_params(self) -> list[Tensor]:
        """Return the parameters whose gradients wait, scaled, for a further backward."""
        steps = list(self.steps.values())
        return [param for step in steps for param in step.backward.scaled_params()]

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave every check of a scaler that ``delay_overflow_check`` left open to the caller.

        Returns:
            Whether one of them found an overflow.
        """
        return any([check.take_over(scaler) for check in self._pending()])  # noqa: C419  # of all

    def has_found(self, scaler: LossScaler) -> bool:
        """Return whether a check of a scaler that was left open found an overflow."""
        return any(check.has_found(scaler) for check in self._pending())

    def _pending(self) -> list[Pending]:
        return [check for step in list(self.steps.values()) for check in step.skip.pending]

    def put_scalers_first(
        self,
        scalers: Sequence[LossScaler],
        instead: Callable[[int, int, LossScaler], LossScaler],
    ) -> None:
        """Put scalers at the head of the process's list, and say which of them losses use.

        Behind them come the others that losses go on using; what no loss uses is dropped.

        Args:
            scalers: at their positions, loss_ids that an optimizer has none of its own for.
            instead: (loss_id, position in the list, scaler) of a loss of an optimizer -> the
                scaler that it uses from now on.
        """
        before = list(self._scalers)
        self._scalers[:] = scalers
        # The optimizers of one call have one mapping.
        mappings = {id(step.scalers): step.scalers for step in self.steps.values()}
        for mapping in mappings.values():
            for loss_id, index in mapping.items():
                scaler = instead(loss_id, index, before[index])
                if scaler not in self._scalers:
                    self._scalers.append(scaler)
                mapping[loss_id] = self._scalers.index(scaler)

    def scaler_of(self, step: OptimizerStep, loss_id: Any) -> int:
        """Return the index of the scaler of an optimizer's loss.

        Raises:
            TypeError, IndexError: no such loss.
        """
        known = loss_id in step.scalers if isinstance(loss_id, int) else False
        return step.scalers[loss_id] if known else self.check_scaler(loss_id)

    def check_scaler(self, index: Any) -> int:
        """Return ``index`` if the list of scalers has it.

        Raises:
            TypeError: it is no int.
            IndexError: there is no such scaler.
        """
        if not isinstance(index, int):
            raise TypeError(
                f"loss_id must be an int, the number of a loss; got {type(index).__name__}; "
                "call amp.scale_loss(loss, optimizer, loss_id=0), or amp.loss_scale(loss_id=0)."
            )
        count = len(self._scalers)
        if not 0 <= index < count:
            mend = f"initialize(..., num_losses={index + 1})"
            if index < 0:  # the last, as a list would have it
                mend = f"scale_loss(loss, optimizer, loss_id={count - 1})"
            raise IndexError(
                f"loss_id must be at least 0 and below the number of losses ({count}); got "
                f"{index}; call amp.{mend}."
            )
        return index

    def _set_scalers(self, scalers: Iterable[LossScaler]) -> None:
        self._scalers[:] = scalers

    def _assign_scalers(self, rule: ScaleRule, num_losses: int) -> dict[int, int]:
        """Return loss_id -> index in the list of scalers for the optimizers of one call.

        A scaler in use by a living optimizer is shared where its rule is the same and not reset;
        where the rule differs the call gets one of its own at the end of the list. A scale that is
        lost begins anew: what diverged before, and lives on in a traceback or a scheduler, would
        leave it to this call.
        """
        scalers = self._scalers
        in_use = {index for step in self.steps.values() for index in step.scalers.values()}
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


def _trains_halves(optimizer: Optimizer) -> bool:
    return any(one.requires_grad and one.dtype in HALVES for one in params_of(optimizer))


def _has_dense_parts(optimizer: Optimizer) -> bool:
    """Return whether a fused step can step it; of spread parameters (DTensor) torch's own does."""
    if not any_spread(params_of(optimizer)):
        return True
    warn_once(
        "fused_step=True steps plain tensors; got a "
        f"{type(optimizer).__name__} of parameters that are spread over ranks (DTensor): its own "
        "step is used. Leave fused_step out to go on without this warning."
    )
    return False
