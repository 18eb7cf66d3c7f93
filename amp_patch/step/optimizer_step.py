"""What an optimizer does around its own step: skips it, steps masters, publishes them.

Knows one optimizer, its gradients and masters; nothing of models, levels or how scales move.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from amp_patch.casting.mode import HALVES, mode
from amp_patch.kernels.graph_capture import captures
from amp_patch.kernels.host_copy import HostCopy
from amp_patch.optimizers.fused_step import refuse_options
from amp_patch.patching import Patches, bind
from amp_patch.weights.fp32_values import FP32Store
from amp_patch.weights.lazy_gradients import clear_grads

from .optimizer_backward import OptimizerBackward
from .skip import must_be_told, step_by_flag

_FP32 = torch.float32


class _SkippedInClosure(Exception):
    """Ends a step from inside its closure."""


class OptimizerStep(OptimizerBackward):
    """One optimizer as `amp.initialize` left it.

    Args:
        optimizer: held weakly; ``step``, ``zero_grad`` and ``add_param_group`` are replaced.
        store: where the masters' fp32 values come from; None for levels without masters.
        scalers: the index of the loss scaler that each loss_id of this optimizer uses.
        announce: gets the message of each skipped step.
        fused: step by `FusedStep`; with a store only.

    Attributes:
        scalers: as given.
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
        super().__init__(optimizer, store, fused)
        self._announce = announce
        self._patches = Patches()
        self.scalers = scalers
        self._skipped: bool | HostCopy = False
        self.ended = 0
        self._published = False
        # torch's own zero_grad() sets None, at a cost of 0.4 us per parameter.
        inherits = type(optimizer).zero_grad is Optimizer.zero_grad
        self._clears_plainly = inherits and "zero_grad" not in vars(optimizer)
        self._hook = None if store is None else self._publish_before_other_hooks(optimizer)
        self._patch(optimizer, "step", self._step)
        self._patch(optimizer, "zero_grad", self._zero_grad)
        if self.masters is not None:
            self._patch(optimizer, "add_param_group", self._add_param_group)

    @property
    def skipped(self) -> bool:
        """True when the last call of ``step`` was skipped. May wait for its device."""
        if isinstance(self._skipped, HostCopy):
            self._skipped = bool(self._skipped.wait().item())
        return self._skipped

    def announce(self, message: str) -> None:
        """Say what is to be said of a skipped step."""
        self._announce(message)

    def release(self) -> None:
        """Undo all of it: the optimizer steps its own parameters again, state kept."""
        self._end_pending()
        if self.masters is not None:
            self.masters.release()
        if self._hook is not None:
            self._hook.remove()
        self._patches.undo()

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
        return type(self._optimizer()).__module__.startswith(("torch.optim.", "amp_patch."))

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
