"""The initialized optimizers; what the step of one does is `optimizer_step`'s. Knows no model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.warn_once import warn_once
from amp_patch.distributed.engines import is_zero, local_optimizer
from amp_patch.distributed.process_groups import StepRanks
from amp_patch.distributed.shards import any_spread
from amp_patch.levels import HALVES, OptLevel
from amp_patch.optimizers.groups import params_of
from amp_patch.optimizers.registry import refuse_unknown
from amp_patch.optimizers.wrapped_optimizers import wrapped_by
from amp_patch.patching import Patches
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.rollback import Attributes

from .observers import Observers
from .optimizer_backward import OptimizerBackward
from .optimizer_step import OptimizerStep
from .others_backwards import OthersBackwards
from .replaced_methods import bases_without_hooks
from .shared_scalers import SharedScalers
from .skip import Pending

#: Returns the ids of the leaves that a backward reaches; its graph is looked through once.
Reached = Callable[[], set[int]]


class PreparedOptimizers:
    """What was set up for each optimizer; both go when the user drops the optimizer.

    Args:
        scalers: the list of the process.
        announce: gets the message of each skipped step.
        observers: told of each step.

    Attributes:
        steps: what was set up for each optimizer, held weakly.
        scalers: which loss scalers their losses use.
        running: those of them that are stepping, without a closure.
    """

    def __init__(
        self, scalers: list[LossScaler], announce: Callable[[str], None], observers: Observers
    ) -> None:
        self._announce, self._observers = announce, observers
        self.steps: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = (
            weakref.WeakKeyDictionary()
        )
        self.scalers = SharedScalers(scalers, self.steps)
        self.running: list[OptimizerStep] = []
        # Each forward asks for them: a list is read in a quarter of the time of a weak dict.
        self._masters: list[weakref.ref[MasterWeights]] = []
        self._steps: list[weakref.ref[OptimizerStep]] = []  # likewise, for each pass
        self._bases: weakref.WeakSet[type[Optimizer]] = weakref.WeakSet()  # whose steps are patched
        self._patches = Patches()

    def set_up(
        self,
        optimizers: Iterable[Optimizer],
        level: OptLevel,
        values: FP32Values,
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
            values: where the masters' fp32 values come from.
            scale_rule: of each of the call's losses.
            num_losses: how many there are.
            fused_step: whether the optimizers step by `FusedStep`, which needs masters.
            ranks: returns those that step together with an optimizer, see `ranks_given`.
            on_error: gets what undoes it.
        """
        scaler_ids = self.scalers.assign(scale_rule, num_losses, on_error)
        is_scaled = scale_rule.dynamic or scale_rule.init_scale != 1.0
        for given in optimizers:
            optimizer = local_optimizer(given) if level.master_weights else given
            together = ranks(given, optimizer is not given)
            self._follow_bases(optimizer)
            changed = {id(one): one for one in (given, optimizer, *wrapped_by(optimizer))}
            on_error.callback(Attributes(changed.values()).restore)
            step = OptimizerStep(
                optimizer,
                values if level.master_weights else None,
                scaler_ids,
                self._announce,
                self._observers,
                self.running,
                fused=fused_step and _may_be_fused(optimizer),
                ranks=together,
                steps_halves=not level.casts_functions or _trains_halves(optimizer),
                was_scaled=functools.partial(self._was_scaled, scaler_ids) if is_scaled else None,
            )
            on_error.callback(step.release)
            self._enter(optimizer, step, on_error)
            if is_zero(given) and (is_scaled or level.master_weights):
                step.refuse_join(given)
            if optimizer is not given:
                step.follow_zero(given, values)
            else:
                self._follow_given(step, given, together, level)
            if level.cast_model_type in HALVES:
                step.state.match()

    def _enter(
        self, optimizer: Optimizer, step: OptimizerStep, on_error: contextlib.ExitStack
    ) -> None:
        self.steps[optimizer] = step
        on_error.callback(self.steps.pop, optimizer, None)
        reference = weakref.ref(step, self._forget_step)
        self._steps.append(reference)
        on_error.callback(self._forget_step, reference)
        if step.masters is not None:
            self._masters.append(weakref.ref(step.masters, self._masters.remove))
            step.masters.publish_at_end_of(optimizer)

    def _follow_bases(self, optimizer: Optimizer) -> None:
        """See steps by ``super().step()`` in methods of its own, where torch calls no hooks.

        Torch's own way to have them called would call those of the script once more, too, in a step
        that goes on by ``super().step()``.
        """
        for base in bases_without_hooks(optimizer):
            if base not in self._bases:
                self._bases.add(base)
                self._patches.replace(base, "step", self._followed(base))

    def _followed(self, base: Any) -> Callable[..., Any]:
        """Return what stands in the place of the step of a class."""
        original, reference = base.step, weakref.ref(self)

        @functools.wraps(original)
        def followed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Torch wraps this for good where an optimizer of the class is made, and calls hooks.
            prepared = reference() if base.step is followed else None
            step = None if prepared is None else prepared.of_stepped(optimizer)
            if step is None:
                return original(optimizer, *args, **kwargs)
            step.begin_past_own(args[0] if args else kwargs.get("closure"))
            result = original(optimizer, *args, **kwargs)
            step.end_past_own()
            return result

        return followed

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

    def of_stepped(self, optimizer: Optimizer) -> OptimizerStep | None:
        """Return what was set up for the optimizer that a hook of torch's steps gets.

        A proxy, as checkpoints step one, is not what was prepared.
        """
        return None if type(optimizer) in weakref.ProxyTypes else self.steps.get(optimizer)

    def publish_writes(self) -> None:
        """A forward comes next; see `MasterWeights.publish_writes`."""
        for reference in [*self._masters]:  # each forward asks: no generator
            if (masters := reference()) is not None:
                masters.publish_writes()

    def note_writes(self) -> None:
        """The values of parameters are asked for; see `MasterWeights.note_writes`."""
        for masters in self._living_masters():
            masters.note_writes()

    def _living_masters(self) -> Iterator[MasterWeights]:
        for reference in [*self._masters]:
            masters = reference()
            if masters is not None:
                yield masters

    def note_data_read(self, param: Tensor) -> None:
        """The ``.data`` of a tensor is about to be read; see `MasterWeights.note_data_read`."""
        for masters in self._scripts_masters():
            masters.note_data_read(param)

    def note_data_set(self, param: Tensor) -> None:
        """The ``.data`` of a tensor is about to be set; see `MasterWeights.note_data_set`."""
        for masters in self._scripts_masters():
            masters.note_data_set(param)

    def _scripts_masters(self) -> Iterator[MasterWeights]:
        for reference in [*self._steps] if self._masters else ():
            step = reference()
            if step is not None and (masters := step.scripts_masters()) is not None:
                yield masters

    def look_again(self, level: OptLevel) -> None:
        """Models were stored in half: those of their parameters that are stepped get masters.

        Args:
            level: of these models.
        """
        for step in list(self.steps.values()):
            if step.masters is not None:
                step.backward.held.look_again()
            elif level.master_weights:
                step.refuse_stored(level.name)

    def param_of(self, stepped: Tensor) -> Tensor:
        """Return the half parameter of a master; a tensor that is no master stands for itself."""
        for step in list(self.steps.values()):
            masters = step.masters
            if masters is not None and (param := masters.pairs.param_of(stepped)) is not stepped:
                return param
        return stepped

    def params(self) -> list[Tensor]:
        """Return the models' parameters that any of them steps, here or on another rank (ZeRO)."""
        steps = list(self.steps.values())
        return list(chain.from_iterable(step.backward.params() for step in steps))

    def _was_scaled(self, scaler_ids: Mapping[int, int], backward: OptimizerBackward) -> bool:
        """Return whether a loss was scaled for an optimizer, or one that shares its parameters.

        A script that scales it by hand is believed.

        Args:
            scaler_ids: the index of the loss scaler of each of its losses.
            backward: of the optimizer.
        """
        if any(scaler.is_by_hand for scaler in self.scalers.of(scaler_ids)):
            return True
        own = set(map(id, backward.pairs().model))
        return any(
            other.backward.zeroing.has_written
            and not own.isdisjoint(map(id, other.backward.pairs().model))
            for other in list(self.steps.values())
        )

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
        steps = list(self.steps.values())
        unscaled: set[int] = set()
        # one by one, for two of them may hold a parameter
        ends = [step.end_backwards(unscaled) for step in steps]
        for end in ends:
            end()
        for step in steps:
            step.give_back()
        self._patches.undo()

    def others(self, steps: Sequence[OptimizerStep]) -> list[OthersBackwards]:
        """Return what all but these do around a backward."""
        if len(self._steps) == len(steps):
            return []
        every = [reference() for reference in self._steps]
        return [step.backward.others for step in every if step is not None and step not in steps]

    def give_back_gradients(self, reached: Reached) -> None:
        """See `ShownMasters.give_back`; of the backward of another model nothing."""
        for one in self._with_masters(reached):
            one.shown.give_back()

    def offer_gradients(self, reached: Reached) -> None:
        """See `ShownMasters.offer`; arguments are those of `give_back_gradients`."""
        for one in self._with_masters(reached):
            one.shown.offer()

    def _with_masters(self, reached: Reached) -> list[OptimizerBackward]:
        """Return those with masters, but what another thread trains, and a backward leaves alone.

        Args:
            reached: see `Reached`, of a backward in this thread.
        """
        found: list[OptimizerBackward] = []
        for reference in [*self._steps] if self._masters else ():
            step = reference()
            if step is None or step.masters is None:
                continue
            one = step.backward
            if one.current.is_here or not reached().isdisjoint(map(id, one.pairs().model)):
                found.append(one)
        return found

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


def _trains_halves(optimizer: Optimizer) -> bool:
    return any(one.requires_grad and one.dtype in HALVES for one in params_of(optimizer))


def _may_be_fused(optimizer: Optimizer) -> bool:
    """Return whether a fused step can step it; of spread parameters (DTensor) torch's own does.

    Raises:
        TypeError, RuntimeError: see `refuse_unknown`.
    """
    if not any_spread(params_of(optimizer)):
        refuse_unknown(optimizer)
        return True
    warn_once(
        "fused_step=True steps plain tensors; got an optimizer of type "
        f"{type(optimizer).__name__} of parameters that are spread over ranks (DTensor): its own "
        "step is used. Leave fused_step out to go on without this warning."
    )
    return False
