"""The step of an initialized optimizer: skipped, or made by the masters and published.

Knows one optimizer; nothing of models, levels or how scales move.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from amp_patch.casting.mode import mode
from amp_patch.casting.running_modules import is_called
from amp_patch.common.early_looks import WATCHED
from amp_patch.distributed.engines import refuse_join
from amp_patch.distributed.process_groups import StepRanks
from amp_patch.levels import HALVES
from amp_patch.optimizers.device_flag import must_be_told, step_by_flag
from amp_patch.optimizers.direct_step import DirectStep
from amp_patch.optimizers.fused_by_default import FusedByDefault
from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.optimizers.wrapped_optimizers import wrapped_by
from amp_patch.patching import Patches
from amp_patch.weights.fp32_values import FP32Values
from amp_patch.weights.frozen_masters import end_turn
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.parameter_lists import clear_grads, store_grads, stored_grads

from .added_groups import AddedGroups
from .closure import CheckedClosure, SkippedInClosure, StateBeforeStep, evaluates_first
from .first_scale import FirstScale
from .held_params import HeldParams
from .observers import Observers
from .optimizer_backward import OptimizerBackward
from .optimizer_state import OptimizerState
from .publication import Phase, Publication
from .release import release
from .replaced_methods import ReplacedMethods, own_methods
from .skip import Skip
from .turned_half import turn_to_fp32
from .zero_grad import ZeroGrad
from .zero_shares import ZeroShares


class OptimizerStep:
    """One optimizer as `amp.initialize` left it.

    Args:
        optimizer: held weakly; ``step``, ``zero_grad`` and ``add_param_group`` are replaced.
        values: where the masters' fp32 values come from; None for levels without masters.
        scalers: the index of the loss scaler that each loss_id of this optimizer uses.
        announce: gets the message of each skipped step.
        observers: told of each step.
        running: gets the steps that run without a closure, for as long as they do.
        fused: step by `FusedStep`, which knows its type; with masters only.
        ranks: that step together; None: they follow from the parameters.
        steps_halves: step half parameters that have no masters; else these are refused when they
            are to be trained.
        was_scaled: returns whether a scaled loss has reached its parameters; asked until one has.
            None where there is no loss scale.

    Attributes:
        scalers: as given.
        skip: whether the next step is skipped, and whether the last one was.
        masters: of half parameters; None for levels without.
        backward: what comes before the step.
        state: its ``state``, through loads and casts.
        groups: that it is given later.
        ended: how many steps there were, those skipped included.
        methods: that stand in the place of the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        values: FP32Values | None,
        scalers: dict[int, int],
        announce: Callable[[str], None],
        observers: Observers,
        running: list[OptimizerStep],
        *,
        fused: bool,
        ranks: StepRanks | None,
        steps_halves: bool,
        was_scaled: Callable[[OptimizerBackward], bool] | None,
    ) -> None:
        self._observers, self._running = observers, running
        self._optimizer = weakref.ref(optimizer)
        self.methods = ReplacedMethods()
        self._undo: list[Callable[[], object]] = []
        self._shares: ZeroShares | None = None
        self.scalers = scalers
        self._direct = DirectStep(optimizer) if not fused and DirectStep.suits(optimizer) else None
        # the steps are made by code that is neither torch's nor ours
        self._is_foreign = not fused and self._direct is None
        lazy = LazyGradients() if fused else None
        wrapped = wrapped_by(optimizer)
        self.masters = (
            None
            if values is None
            else MasterWeights(optimizer, values, lazy, self._is_foreign, wrapped)
        )
        self._fused = None if lazy is None else FusedStep(optimizer, lazy, self.masters)
        self._lock = threading.RLock() if self.masters is None else self.masters.lock
        self.skip = Skip(announce)
        held = HeldParams(optimizer, self.masters, ranks, steps_halves)
        self._held = held
        self.backward = OptimizerBackward(optimizer, held, self._fused, self.skip)
        self._first_scale = None if was_scaled is None else FirstScale(self.backward, was_scaled)
        self.ended = 0
        self._halves_of: str | None = None  # the level of a model that was stored later
        self._thread: int | None = None
        self._is_past_own = False
        self._set_aside: list[Tensor | None] | None = None
        self._zero_grads = ZeroGrad(
            optimizer, self.backward, self.masters, self._fused, self.methods
        )
        follow_gradients = self.backward.follow_hooks
        self._publication = Publication(
            optimizer, wrapped, self.masters, self._fused, self._is_foreign, follow_gradients
        )
        self.state = OptimizerState(optimizer, wrapped, held, self._direct or self._fused)
        self.groups = AddedGroups(optimizer, held, self.methods, fused)
        self._patch_methods(optimizer, wrapped)

    def _patch_methods(self, optimizer: Optimizer, wrapped: Sequence[Optimizer]) -> None:
        replace = self.methods.replace
        replace(optimizer, "step", self._step)
        replace(optimizer, "zero_grad", self._zero_grad)
        for one in wrapped:
            replace(one, "step", self._step_wrapped, is_wrapped=True)
            replace(one, "zero_grad", self._zero_grad, is_wrapped=True)
        replace(optimizer, "add_param_group", self._add_group)
        for one in (optimizer, *wrapped):
            for name in own_methods(one):
                replace(one, name, self._call_own, is_wrapped=one is not optimizer)

    def _add_group(self, original: Callable[..., Any], param_group: Any) -> None:
        self.groups.add(original, param_group)
        if not self.backward.current.is_open:
            self.backward.joined.take_over()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None when the user has dropped it."""
        return self._optimizer()

    def release(self) -> None:
        """Undo all of it: the optimizer steps its own parameters again, state kept."""
        self.end_backwards(set())()
        self.give_back()

    def end_backwards(self, unscaled: set[int]) -> Callable[[], None]:
        """Begin `release`, see `release.release`."""
        self.state.note_dtypes()
        return release(self.backward, self._fused, unscaled)

    def give_back(self) -> None:
        """End `release`, where no backward of any optimizer is to be ended any more."""
        if self.masters is not None:
            self.masters.release()
        self._publication.remove()
        self.methods.undo()
        self.state.remove()
        for undo in self._undo:
            undo()

    def fuse_by_default(self, optimizer: Optimizer) -> None:
        """Step by torch's fused kernel where the script leaves the choice to torch."""
        if self._direct is not None and type(optimizer) in (AdamW, Adam):
            fused = FusedByDefault(optimizer)
            self.groups.when_added = fused.enter
            self._undo.append(fused.remove)

    def follow_zero(self, zero: Optimizer, values: FP32Values) -> None:
        """The optimizer is the local one of a `ZeroRedundancyOptimizer`, by which users step it.

        Args:
            zero: the latter.
            values: see `ZeroShares`.
        """
        self.groups.are_own = True
        self.state.save_masters(zero)
        self._shares = ZeroShares(zero, values, self.backward, self.methods)

    def refuse_join(self, zero: Optimizer) -> None:
        """The user steps by this `ZeroRedundancyOptimizer`, whose steps may be skipped."""
        patches = Patches()
        patches.replace(zero, "join_hook", refuse_join)
        self._undo.append(patches.undo)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        self._look_before(goes_on=closure is not None)
        if closure is not None:
            kwargs.pop("closure", None)
            return self._step_with_closure(original, closure, *args[1:], **kwargs)
        self._look_at_gradients()
        if self.skip.is_possible and self._has_to_know() and self.skip.found():
            return self._skip()
        if self.masters is not None:
            self._reconcile(self.masters)
        self._thread = threading.get_ident()
        self._running.append(self)
        try:
            return self._run(self.skip.flag, original, *args, **kwargs)
        finally:
            self._running.remove(self)

    def _look_before(self, *, goes_on: bool) -> None:
        if self._publication.phase is Phase.UNPUBLISHED:
            self._publication.publish()
        if self._halves_of is not None:
            self._refuse_halves(self._halves_of)
        if self.skip.pending:
            self.skip.settle()
        self.backward.refuse_scaled("optimizer.step()", steps=True, goes_on=goes_on)
        # only in the first steps: a layer that sets its weights by its first batch does so then
        is_watched = self.ended < WATCHED and self.masters is None
        if is_watched and not self._held.steps_halves:
            turn_to_fp32(self.backward.pairs().master)

    def refuse_stored(self, level: str) -> None:
        """Its next step raises, should it step parameters that a model of ``level`` has in half."""
        self._halves_of = level

    def _refuse_halves(self, level: str) -> None:
        params = self.backward.pairs().master
        count = sum(param.requires_grad and param.dtype in HALVES for param in params)
        if count:
            raise RuntimeError(
                f"at opt_level {level} a model's parameters are stepped through fp32 masters; got "
                f"{count} in the {type(self.optimizer).__name__} of an amp.initialize() without "
                "masters, of a model that a later call has stored in half. Call "
                "amp.initialize([model, other_model], optimizer, opt_level=...) once, with all "
                "models of the optimizer."
            )
        self._halves_of = None

    def _look_at_gradients(self) -> None:
        if self._first_scale is not None and self._first_scale.look():
            self._first_scale = None
        self.backward.zeroing.tell_of_no_gradients(self.backward.pairs)
        self.backward.look_at_given()

    def begin_past_own(self, closure: Any) -> None:
        """torch steps the optimizer, called past what stands in the place of ``step``.

        A method of the optimizer's own does so by ``super().step()``, as ``second_step`` of a SAM
        that is derived from SGD. What is to be skipped then finds no gradients.

        Args:
            closure: that torch's step is given, which brings gradients of its own; or None.
        """
        if self._publication.is_stepping or closure is not None:
            return
        self._set_aside = None  # of a step that raised
        self._look_before(goes_on=False)
        self._look_at_gradients()
        self._is_past_own = True
        if self.skip.is_possible and self.skip.found():
            params = self.backward.pairs().master
            self._set_aside = stored_grads(params)
            clear_grads(params)
        elif self.masters is not None:
            self.masters.reconcile()

    def end_past_own(self) -> None:
        """What `begin_past_own` was told of is over."""
        if not self._is_past_own or self._publication.is_stepping:
            return
        self._is_past_own = False
        if self._set_aside is not None:
            store_grads(self.backward.pairs().master, self._set_aside)
            self._set_aside = None
            self._skip()
        else:
            self.skip.note_made(None)
            self._end(is_made=True)

    def receive_in_step(self) -> None:
        """A backward in the step itself, and in no closure, has ended, as GSAM makes two."""
        if self.masters is not None and self._thread == threading.get_ident():
            self.backward.shown.receive_unscaled()

    def scripts_masters(self) -> MasterWeights | None:
        """Return the masters where a script may write to them, also in a hook after the step."""
        return None if self._publication.phase is Phase.STEPS else self.masters

    def _call_own(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that torch's optimizers do not have, as ``first_step`` of SAM.

        It may write to masters, which then win over what a script wrote to half weights before. It
        finds gradients at them, also those that a script gave to half weights by hand, and those
        that wait scaled for a later backward, as DDP's advice for SAM leaves them on each rank.
        """
        if self._publication.is_stepping:
            return original(*args, **kwargs)
        if self.masters is not None:
            self.masters.reconcile()
            self.backward.shown.offer()
        with self.backward.shown.show_scaled():
            return original(*args, **kwargs)

    def _step_wrapped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that the initialized one wraps, in the place of its own step or in it.

        SAM steps it in ``second_step``, which nobody replaces.
        """
        if self._publication.is_stepping:
            return original(*args, **kwargs)
        return self._step(original, *args, **kwargs)

    def _reconcile(self, masters: MasterWeights) -> None:
        """Make masters and half parameters agree, now or in the pass that steps them."""
        masters.follow_ties()
        optimizer = self._optimizer()
        if self._fused is not None and optimizer is not None and self._fused.reconciles(optimizer):
            masters.reconcile_later()
        else:
            masters.reconcile()

    def _has_to_know(self) -> bool:
        """Return whether the host skips the next step; else the device does."""
        if self.skip.is_certain:
            return True
        optimizer = self._optimizer()
        return self._fused is None and optimizer is not None and must_be_told(optimizer)

    def _step_with_closure(
        self, original: Callable[..., Any], closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        # What was found before is looked at in the closure, which may clear the gradients.
        optimizer, before = self._optimizer(), None
        if self.masters is not None:
            self.masters.reconcile()
        if optimizer is not None and not evaluates_first(optimizer):
            before = StateBeforeStep(optimizer, self.backward.pairs().master)
        try:
            first = self._first_scale
            looking = closure if first is None else first.looking(closure)
            checked = CheckedClosure(looking, self.backward)
            return self._run(None, original, checked, *args, **kwargs)
        except BaseException as error:
            if before is not None:
                before.restore()
                self._publication.publish()
            if isinstance(error, SkippedInClosure):
                self._skip()
                return error.loss
            raise

    def _run(
        self, flag: Tensor | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make the step, which changes nothing where a device's flag is not 0."""
        publication = self._publication
        with self._lock:
            saved = mode.switch_off()
            publication.phase = Phase.STEPS
            try:
                result = self._call(flag, original, *args, **kwargs)
            finally:
                mode.restore(saved)
                publication.end()
        self.skip.note_made(flag)
        if self._is_foreign and self.masters is not None:
            self.backward.follow_foreign_step()
        self._end(is_made=True)
        return result

    def _call(
        self, flag: Tensor | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        optimizer, writes = self._optimizer(), self._publication.writes
        if optimizer is not None and writes is not None:
            writes.begin(optimizer)
        if optimizer is not None and self._fused is not None:
            return self._fused.run(optimizer, flag, *args, **kwargs)
        # Not with a parameter that is repeated: torch's functions for many tensors read it once, so
        # that both of its steps would start from the same number.
        direct = None if args or kwargs or self._held.are_repeated else self._direct
        if direct is not None and optimizer is not None and direct.is_right(optimizer):
            return direct.run(optimizer, flag)
        if flag is None or optimizer is None:
            return original(*args, **kwargs)
        return step_by_flag(optimizer, flag, lambda: original(*args, **kwargs))

    def _skip(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            # A scheduler that steps next must not warn that the optimizer was never stepped.
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it
        if self.masters is not None:
            self.masters.end_exposure()
        self.skip.note_skipped()
        self._end(is_made=False)

    def _end(self, is_made: bool) -> None:
        """The step is over, made or skipped: its gradients are used up."""
        self.ended += 1
        if self._fused is not None:
            self._fused.lazy.drop()
        if self.masters is not None:
            self.masters.clear_grads()
        self.backward.end_step(is_made)
        end_turn()
        if self._observers and (optimizer := self._optimizer()) is not None:
            self._observers.stepped(optimizer, self.skip)

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # A closure may clear between its forward, which saved the weights, and its backward.
        if self._publication.phase is Phase.UNPUBLISHED:
            self._publication.publish()
        if self.skip.pending:
            self.skip.settle()
        self._zero_grads.clear(self._optimizer(), original, *args, **kwargs)


def is_stepping() -> bool:
    """Return whether the step of a prepared optimizer is on the stack, which runs without casts."""
    return is_called(OptimizerStep._run.__code__)
