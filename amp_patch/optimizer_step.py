"""What an optimizer does around its own step: skips it, steps masters, publishes them.

Knows one optimizer, its gradients and masters; nothing of models, levels or how scales move.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .captures import captures
from .cast_mode import HALVES, mode
from .device_skip import DeviceSkip, must_be_told, skips_by_flag, step_by_flag
from .fp32_store import FP32Store
from .fused_step import FusedStep, refuse_options
from .gradients import Gradients
from .half_gradients import HalfGradients
from .host_copy import HostCopy
from .kernels import GradCheck
from .lazy_gradients import clear_grads, stored_grad
from .master_weights import MasterWeights
from .patching import Patches, bind
from .reception import Held
from .stray_gradients import StrayGradients, Watch

_FP32 = torch.float32


class Unsettled(Protocol):
    """A check of gradients whose result nobody has asked for yet (``delay_overflow_check``)."""

    def settle(self) -> None:
        """Move the loss scale and tell every optimizer concerned whether to skip."""


class _SkippedInClosure(Exception):
    """Ends a step from inside its closure."""


class OptimizerStep:
    """One optimizer as `amp.initialize` left it.

    Args:
        optimizer: held weakly; ``step``, ``zero_grad`` and ``add_param_group`` are replaced.
        store: where the masters' fp32 values come from; None for levels without masters.
        scalers: the index of the loss scaler that each loss_id of this optimizer uses.
        announce: gets the message of each skipped step.
        fused: step by `FusedStep`; with a store only.

    Attributes:
        skip_message: why the next step must be skipped, or None.
        scaling: True inside a ``scale_loss`` of this optimizer.
        unsettled: checks to settle before the next step.
        ended: how many steps there were, those skipped included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        store: FP32Store | None,
        scalers: dict[int, int],
        announce: Callable[[str], None],
        fused: bool = False,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._announce = announce
        self._patches = Patches()
        self._fused = FusedStep(optimizer) if fused else None
        lazy = None if self._fused is None else self._fused.lazy
        self.gradients = Gradients(lazy)
        self.masters = None if store is None else MasterWeights(optimizer, store, lazy)
        if self._fused is not None and self.masters is not None:
            self._fused.param_of = self.masters.param_of
        self.scalers = scalers
        self.skip_message: str | None = None
        self._skipped: bool | HostCopy = False
        self._device_skip = DeviceSkip()
        self._strays = StrayGradients()
        self.scaling = False
        self.unsettled: list[Unsettled] = []
        self.ended = 0
        self._held = Held([], [])
        self._published = False
        # torch's own zero_grad() sets None, at a cost of 0.4 us per parameter.
        inherits = type(optimizer).zero_grad is Optimizer.zero_grad
        self._clears_plainly = inherits and "zero_grad" not in vars(optimizer)
        self._hook = None if store is None else self._publish_before_other_hooks(optimizer)
        self._patch(optimizer, "step", self._step)
        self._patch(optimizer, "zero_grad", self._zero_grad)
        if self.masters is not None:
            self._patch(optimizer, "add_param_group", self._add_param_group)

    def held(self) -> Held:
        """Return what the optimizer holds now."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        if len(groups) == 1:
            stepped = groups[0]["params"]
        else:
            stepped = list(chain.from_iterable(group["params"] for group in groups))
        known = self._held.stepped
        if len(stepped) != len(known) or not all(map(operator.is_, stepped, known)):
            stepped = list(stepped)
            masters = self.masters
            params = stepped if masters is None else [masters.param_of(p) for p in stepped]
            self._held = Held(params, stepped)
        return self._held

    @property
    def takes_grads_as_they_are(self) -> bool:
        """True where a scale of 1 leaves nothing to do: no masters, nothing delayed."""
        return self.masters is None and self.gradients.delayed_scale is None

    @property
    def skipped(self) -> bool:
        """True when the last call of ``step`` was skipped. May wait for its device."""
        if isinstance(self._skipped, HostCopy):
            self._skipped = bool(self._skipped.wait().item())
        return self._skipped

    @property
    def skips_by_flag(self) -> bool:
        """True where the device can skip the next step, whatever the host knows."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        fused = self._fused
        can_be = skips_by_flag(optimizer) if fused is None else fused.skips_by_flag(optimizer)
        stepped = self.held().stepped
        if stepped and not can_be:
            captures.refuse_waiting(stepped[0].device)
        return can_be

    def skip_if(self, found_inf: Tensor) -> None:
        """Have the device skip the next step where a flag is not 0."""
        self._device_skip.add(found_inf)

    def announce(self, message: str) -> None:
        """Say what is to be said of a skipped step."""
        self._announce(message)

    def has_master_of(self, param: Tensor) -> bool:
        """Return whether it steps a master of a half parameter."""
        return self.masters is not None and self.masters.has_master_of(param)

    def drop_cleared(self) -> None:
        """Follow the user who cleared the gradients of the model's parameters."""
        if self.gradients.may_be_cleared:
            self.gradients.drop_cleared(self.held())

    def begin_backward(self, held: Held, scale: float | Tensor) -> None:
        """Make room for the gradients of a loss multiplied by ``scale``."""
        self._strays.drop_cleared()
        self.gradients.set_aside(held, scale)
        self.scaling = True
        may_skip = self.skip_message is not None or self._device_skip.is_open
        if may_skip and self.gradients.are_cleared(self.held()):
            self._forget_skip()  # the user dropped what overflowed

    def delay_unscale(self, scale: float | Tensor) -> None:
        """Leave the gradients scaled, for the next backward to add to."""
        self.scaling = False
        self._strays.note_own_block()
        self.gradients.delay(self.held(), scale)

    def end_backward(self, held: Held, scale: float | Tensor) -> tuple[GradCheck, list[Tensor]]:
        """Receive the gradients, unscaled and checked, and the parameters they are of."""
        self.scaling = False
        self._strays.note_own_block()
        return self.gradients.receive(held, scale)

    def abandon_backward(self, held: Held) -> None:
        """The body of ``scale_loss`` raised: the gradients are as before it."""
        self.scaling = False
        self.gradients.put_back(held)

    def refuse_nested(self) -> None:
        """Raise inside a ``scale_loss`` of the same optimizer.

        Raises:
            RuntimeError: as said.
        """
        if self.scaling:
            raise RuntimeError(
                "scale_loss() blocks of one optimizer must follow each other, for both would "
                "unscale the same gradients; got one inside another. Add the losses and scale "
                "the sum, or leave the first block before the second (delay_unscale=True keeps "
                "its gradients)."
            )

    def stand_by(self, is_scaled: bool) -> Watch:
        """Call before a backward that is not for this optimizer, but may reach its parameters.

        Args:
            is_scaled: whether its gradients are multiplied by a loss scale.

        Returns:
            What `note_strays` needs.
        """
        if self._fused is not None and isinstance(self._fused.lazy.source, HalfGradients):
            self._fused.lazy.materialize()  # unscales half gradients, which may be written to
        waiting = self._fused is not None and self._fused.lazy.are_waiting
        # A half gradient that a master has received is not read again.
        watched = [
            param
            for param, stepped in zip(*self.held(), strict=True)
            if param is stepped or not (waiting or stored_grad(stepped) is not None)
        ]
        return self._strays.watch(watched if is_scaled else [])

    def note_strays(self, watch: Watch, steps: Sequence[OptimizerStep]) -> None:
        """Call after that backward, which was for the optimizers of ``steps``."""
        if not self.scaling:  # a block of its own, around or in another thread, unscales all
            self._strays.note(watch, {id(param) for step in steps for param in step.held().params})

    def clip_waiting(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip gradients that the step unscales itself, for it to do that, too.

        Returns:
            The total norm, 0-dim; None where gradients are clipped as all others are.
        """
        optimizer = self._optimizer()
        if self._fused is None or optimizer is None or norm_type != 2.0:
            return None
        return self._fused.clip(optimizer, max_norm)

    def settle(self) -> None:
        """Finish the checks that ``delay_overflow_check`` left open."""
        while self.unsettled:
            self.unsettled.pop(0).settle()

    def refuse_delayed(self, caller: str) -> None:
        """Raise if gradients are still scaled.

        Raises:
            RuntimeError: as said.
        """
        if self.scaling:
            raise RuntimeError(
                f"{caller} needs unscaled gradients, which there are from the end of a "
                "scale_loss() block on; got a call inside the block. Move it behind the block."
            )
        self.drop_cleared()
        self._strays.refuse(caller)
        if self.gradients.delayed_scale is not None:
            raise RuntimeError(
                f"{caller} needs unscaled gradients; the last scale_loss(..., "
                "delay_unscale=True) left them scaled. Leave delay_unscale out in the last "
                "scale_loss() before it, or clear them with optimizer.zero_grad()."
            )
        self.receive_unscaled()

    def receive_unscaled(self) -> None:
        """Let masters have what a backward outside of ``scale_loss`` left at their parameters."""
        if self.masters is not None and not self.scaling and self.gradients.delayed_scale is None:
            self.gradients.receive_unscaled(self.held())

    def release(self) -> None:
        """Undo all of it: the optimizer steps its own parameters again, state kept."""
        self._end_pending()
        if self.masters is not None:
            self.masters.release()
        if self._hook is not None:
            self._hook.remove()
        self._patches.undo()

    def _end_pending(self) -> None:
        """Nobody skips the next step: unscale delayed gradients, drop those that overflowed."""
        with contextlib.suppress(FloatingPointError):  # of no interest, for the scale goes, too
            self.settle()
        overflow = self.skip_message is not None or self._device_skip.found()
        delayed_scale = self.gradients.delayed_scale
        if delayed_scale is not None and self.gradients.are_delayed(self.held()):
            overflow |= self.gradients.receive(self.held(), delayed_scale)[0].overflow
            self.gradients.put_unwritten_back()
        if overflow:
            for tensor in (*self.held().params, *self.held().stepped):
                tensor.grad = None
        self._forget_skip()

    def _forget_skip(self) -> None:
        self.skip_message = None
        self._device_skip.forget()

    def match_state(self) -> None:
        """Bring the optimizer's state to the dtypes of its parameters, which were cast (O3)."""
        optimizer = self._optimizer()
        for param, state in optimizer.state.items() if optimizer is not None else ():
            # A user's optimizer may keep more than what belongs to a parameter.
            for key, value in state.items() if isinstance(param, Tensor) else ():
                # "step" counts in fp32 whatever the parameter is, as in torch's optimizers.
                if key != "step" and isinstance(value, Tensor) and value.dtype in (*HALVES, _FP32):
                    state[key] = value.to(param.dtype)

    def _patch(self, optimizer: Optimizer, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of the optimizer by ``method(original, *args)``.

        The replacement does not hold this object, which records it: when the optimizer goes, so
        does all that belongs to it, without waiting for the garbage collector.
        """
        weak = weakref.WeakMethod(method)
        own = vars(optimizer).get(name)
        inherited = getattr(type(optimizer), name)
        reference = self._optimizer

        def original(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if own else inherited(reference(), *args, **kwargs)

        # wraps() also hands on the mark by which LR schedulers know a step they have seen.
        @functools.wraps(own or inherited)
        def replacement(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alive = weak()
            if alive is None:  # released, but a scheduler built later still calls this
                return original(*args, **kwargs)
            return alive(original, *args, **kwargs)

        self._patches.replace(optimizer, name, bind(replacement, optimizer))

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle()
        self.refuse_delayed("optimizer.step()")
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            return self._step_with_closure(original, closure, args[1:], kwargs)
        if self.skip_message is not None:
            return self._skip(self.skip_message)
        if self._device_skip.is_open and self._has_to_know() and self._device_skip.found():
            return self._skip("")  # the scaler says so when it hears of it
        if self.masters is not None:
            self.masters.reconcile()
        return self._run(self._device_skip.flag, original, *args, **kwargs)

    def _has_to_know(self) -> bool:
        optimizer = self._optimizer()
        return self._fused is None and optimizer is not None and must_be_told(optimizer)

    def _run(
        self, flag: Tensor | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        saved = mode.switch_off()
        self._published = False
        try:
            result = self._call(flag, original, *args, **kwargs)
        finally:
            mode.restore(saved)
            if not self._published:
                self._publish()
        self._finish(skipped=False)
        if flag is not None:
            captures.follow(flag.device, functools.partial(self._expect, flag))
        return result

    def _expect(self, flag: Tensor) -> None:
        self._skipped = HostCopy(flag)

    def _call(
        self, flag: Tensor | None, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the step returns, which changes nothing where a flag is not 0."""
        optimizer = self._optimizer()
        if optimizer is not None and self._fused is not None:
            return self._fused.run(optimizer, flag, *args, **kwargs)
        if optimizer is None or flag is None:
            return original(*args, **kwargs)
        return step_by_flag(optimizer, flag, lambda: original(*args, **kwargs))

    def _publish_before_other_hooks(self, optimizer: Optimizer) -> RemovableHandle | None:
        """Let the step hooks of users (a moving average of the weights) see what was stepped."""
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return None  # a wrapper that never was initialized as an optimizer calls no hooks
        handle = optimizer.register_step_post_hook(lambda *_: self._publish())
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        return handle

    def _publish(self) -> None:
        if self.masters is not None:
            self.masters.publish(self._fused is not None and self._fused.has_published)
        self._published = True

    def _skip(self, message: str) -> None:
        if message:
            self._announce(message)
        optimizer = self._optimizer()
        if optimizer is not None:
            # A scheduler that steps next must not warn that the optimizer was never stepped.
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers set it
        if self.masters is not None:
            self.masters.end_exposure()
        self._finish(skipped=True)

    def _finish(self, skipped: bool) -> None:
        self._skipped = skipped
        self.ended += 1
        self._forget_skip()
        self._drop_waiting()
        if self.masters is not None:
            self.masters.clear_grads()
        self._strays.forget()
        self.gradients.forget()

    def _step_with_closure(
        self,
        original: Callable[..., Any],
        closure: Callable[[], Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step with a closure, which may run any number of times.

        torch's optimizers evaluate it before they change anything; for any other the state is
        copied first, for the case that a later evaluation is not finite.
        """
        outside = mode.save()
        if self.masters is not None:
            self.masters.reconcile()
        before = None if self._evaluates_first() else self._snapshot()
        kwargs.pop("closure", None)

        def evaluate() -> Any:
            if self.masters is not None:
                self.masters.publish()
            inside = mode.save()
            mode.restore(outside)
            try:
                loss = closure()
            finally:
                mode.restore(inside)
            if self.masters is not None:
                self.masters.reconcile()
            self._require_finite(loss)
            return loss

        try:
            # What was found before is looked at in the closure, which may clear the gradients.
            return self._run(None, original, evaluate, *args, **kwargs)
        except _SkippedInClosure as skipped:
            if before is not None:
                self._restore(before)
            return self._skip(str(skipped))

    def _require_finite(self, loss: Any) -> None:
        self.settle()
        self.refuse_delayed("optimizer.step(closure)")
        if self.skip_message is not None:
            raise _SkippedInClosure(self.skip_message)
        if self._device_skip.found():
            raise _SkippedInClosure  # the scaler says so when it hears of it
        self._device_skip.forget()
        if isinstance(loss, Tensor) and not bool(torch.isfinite(loss.detach()).all()):
            raise _SkippedInClosure(
                "Gradient overflow.  Skipping step, the closure returned a loss that is not finite"
            )

    def _evaluates_first(self) -> bool:
        return type(self._optimizer()).__module__.startswith(("torch.optim.", f"{__package__}."))

    def _snapshot(self) -> tuple[list[Tensor], Any, Any]:
        optimizer = self._optimizer()
        values = [stepped.detach().clone() for stepped in self.held().stepped]
        state = {} if optimizer is None else optimizer.state
        groups = [] if optimizer is None else optimizer.param_groups
        return (
            values,
            {param: copy.deepcopy(entry) for param, entry in state.items()},
            [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in groups],
        )

    @torch.no_grad()
    def _restore(self, before: tuple[list[Tensor], Any, Any]) -> None:
        values, state, groups = before
        for stepped, value in zip(self.held().stepped, values, strict=True):
            stepped.copy_(value)
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        if self.masters is not None:
            self.masters.publish()

    def _drop_waiting(self) -> None:
        if self._fused is not None:
            self._fused.lazy.drop()

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.settle()
        if self._clears_plainly and not args and not kwargs:
            self._drop_waiting()
            params, stepped = self.held()
            clear_grads(stepped)
            if self.masters is not None:
                clear_grads(params)
        else:
            original(*args, **kwargs)
            if self.masters is not None:
                self.masters.zero_param_grads(args[0] if args else kwargs.get("set_to_none", True))
        self._strays.forget()
        self.gradients.forget()
        self._forget_skip()  # what overflowed is gone

    def _add_param_group(self, original: Callable[..., Any], param_group: Any) -> None:
        """Add a group with masters in it; where torch refuses the group, nothing has changed."""
        optimizer = self._optimizer()
        if self._fused is not None and optimizer is not None:
            refuse_options(optimizer, param_group)
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if self.masters is None or params is None or isinstance(params, set):
            original(param_group)
            return
        given = [params] if isinstance(params, Tensor) else list(params)
        count = len(self.masters)
        param_group["params"] = self.masters.replace(given)
        try:
            original(param_group)
        except BaseException:
            self.masters.drop_after(count)
            param_group["params"] = given
            raise
