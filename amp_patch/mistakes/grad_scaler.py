"""``torch.amp.GradScaler`` in a script that called `amp.initialize`: served by our loss scaler.

Its methods are the hooks of a step under other names. Knows the prepared optimizers, and how a
backward pass is made; no model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from amp_patch import kernels
from amp_patch.common.running_backward import is_in_backward
from amp_patch.common.scales import Scale
from amp_patch.common.warn_once import warn_once
from amp_patch.optimizers.groups import params_of
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule
from amp_patch.step.autograd_graph import OF_GRAD_SCALER
from amp_patch.step.backward_pass import BackwardPass
from amp_patch.step.loss_scaling import LossScaling
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.step.prepared_optimizers import PreparedOptimizers
from amp_patch.step.skip import either

from .scaler_cycle import ScalerCycle
from .scaler_stages import ScalerStages

#: Options of `GradScaler`, which are `ScaleRule`'s, too.
_DEFAULTS = {
    name: getattr(ScaleRule(), name)
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
}
#: Those of them that its state has under the same names.
_OF_STATE = ("growth_factor", "backoff_factor", "growth_interval")


class Passes(Protocol):
    """What makes the backward passes of scaled losses; `BackwardPasses` says how."""

    def scaling(
        self,
        steps: Sequence[OptimizerStep],
        scaler_id: int,
        device: torch.device,
        may_be_delayed: bool,
    ) -> LossScaling:
        """Return who scales a loss of these optimizers on a device."""

    def under(
        self, steps: Sequence[OptimizerStep], scaler_id: int, scaling: LossScaling
    ) -> BackwardPass:
        """Return the hooks of a backward pass whose loss is scaled so."""


class ServedScalers:
    """All objects of ``torch.amp.GradScaler``, and of FSDP1's, while an optimizer is prepared.

    They have one scale, that of loss_id 0.

    Args:
        optimizers: the prepared ones.
        scalers: of which that is the first.
        passes: make the passes of their losses.
        unscaled: gets the parameters of an optimizer that is not prepared, when `unscale_` has
            divided their gradients.

    Attributes:
        used: those of which a method was called.
    """

    def __init__(
        self,
        optimizers: PreparedOptimizers,
        scalers: Sequence[LossScaler],
        passes: Passes,
        unscaled: Callable[[Iterable[Tensor]], None],
    ) -> None:
        self._optimizers, self._scalers, self._passes = optimizers, scalers, passes
        self._unscaled = unscaled
        self.used: weakref.WeakSet[Any] = weakref.WeakSet()
        self._cycle = ScalerCycle(scalers)
        self._is_off = False
        self._task = -1
        self._open: BackwardPass | None = None
        self._last_scale: Scale = 1.0
        self._adopted: ScaleRule | None = None  # that `adopt`, or the script, has made of ours

    @property
    def serve(self) -> bool:
        """True while an optimizer is prepared."""
        return bool(self._optimizers.steps) and not self._is_off

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Serve none inside the block."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def scale(self, outputs: Any) -> Any:
        """Return tensors, or containers of them, times the scale.

        Inside of a ``scale_loss`` block they are returned as they are: its loss is scaled.
        """
        if isinstance(outputs, Tensor):
            return self._scale(outputs)
        if not isinstance(outputs, Iterable):
            raise ValueError(
                "GradScaler.scale() takes a tensor, or an iterable of them; got "
                f"{type(outputs).__name__}; call scaler.scale(loss)."
            )
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _scale(self, loss: Tensor) -> Tensor:
        steps = list(self._optimizers.steps.values())
        if self._open is not None and not is_in_backward():
            self._abandon()  # its backward raised
        if any(step.backward.current.is_open for step in steps):
            return loss
        scaling = self._scaling(steps, loss.device)
        self._last_scale = scaling.scale()
        one = self._passes.under(steps, 0, scaling)
        scaled = one.multiply(loss)
        self._scalers[0].is_by_hand = True  # where torch.autograd.grad() takes it
        node: Any = scaled.grad_fn
        if scaling.is_on and node is not None:
            node.metadata[OF_GRAD_SCALER] = True
            node.register_prehook(functools.partial(self._begin, one))
        return scaled

    def _begin(self, one: BackwardPass, grads: Any) -> None:
        """The backward of a scaled loss begins."""
        task = torch._C._current_graph_task_id()
        if self._open is not None and task == self._task:
            return  # of two losses, backward together
        if self._open is not None:
            self._abandon()
        if any(step.backward.current.is_open for step in self._optimizers.steps.values()):
            raise RuntimeError(
                "a loss must be scaled once; got one that GradScaler.scale() has scaled inside of "
                "an amp.scale_loss() block, which scales it, too. Remove the GradScaler: call "
                "scaled_loss.backward() in the block, and optimizer.step() after it."
            )
        for step in self._optimizers.steps.values():
            self._cycle.take_unreached(step)
        one.begin()
        self._open, self._task = one, task
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """It is over; what it wrote stays scaled until `unscale_`."""
        one, self._open = self._open, None
        if one is not None:
            one.leave_scaled()
            steps = list(self._optimizers.steps.values())
            self._cycle.note_unreached(steps, self._last_scale)
            for step in steps:
                step.backward.shown.offer_scaled()

    def _abandon(self) -> None:
        one, self._open = self._open, None
        if one is not None:
            one.abandon()

    def unscale_(self, optimizer: Any) -> None:
        """Divide an optimizer's gradients by the scale, where that was not done."""
        step = self._step_of(optimizer)
        if step is None:
            self._unscale_other(optimizer)
            return
        self._cycle.take_unreached(step)
        if step.backward.gradients.scaled.scale is not None:
            one = self._passes.under([step], 0, self._scaling([step], step.backward.device))
            one.begin()
            one.unscale_()
        else:
            step.backward.shown.receive_unscaled()  # of a scale of 1: for the script to read

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, unless its gradients overflowed; return what its step returns."""
        self.refuse_closure(kwargs)
        key = self._optimizers.originals_of(optimizer)
        if key in self._cycle.stepped:
            self.update()  # which the script has left out
        self.unscale_(optimizer)
        self._cycle.stepped.add(key)
        check = self._cycle.checks.get(key)
        if check is not None and check.overflow:
            return None
        return optimizer.step(*args, **kwargs)

    def refuse_closure(self, kwargs: Mapping[str, Any]) -> None:
        """Raise where the arguments of a step have a closure.

        Raises:
            RuntimeError: as said.
        """
        if "closure" in kwargs:
            raise RuntimeError(
                "GradScaler.step() takes no closure; got one; call optimizer.step(closure) with "
                "an amp.scale_loss() block in the closure."
            )

    def found_inf(self, optimizer: Any) -> Tensor:
        """Return whether the next step of an optimizer is skipped: float32, 0-dim, not 0 then.

        Does not wait for a device.
        """
        step = self._step_of(optimizer)
        if step is not None:
            return step.skip.found_inf(step.backward.device)
        check = self._cycle.checks.get(optimizer)
        flags = [] if check is None else check.found_inf
        device = flags[0].device if flags else "cpu"
        none = torch.zeros((), dtype=torch.float32, device=device)
        return functools.reduce(either, flags, none)

    def update(self, new_scale: Any = None) -> None:
        """Let the scale grow where no step since the last call overflowed, or set it."""
        cycle, self._cycle = self._cycle, ScalerCycle(self._scalers)
        self._optimizers.settle()
        if new_scale is None:
            cycle.end()
        else:
            self._scalers[0].settle()
            self._scalers[0].scale = float(new_scale)

    def get_scale(self) -> float:
        """Return the factor of the next loss."""
        self._optimizers.settle()
        return self._scalers[0].loss_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return our scaler's state in GradScaler's format."""
        scaler = self._scalers[0]
        return {
            "scale": self.get_scale(),
            "growth_factor": scaler.rule.growth_factor,
            "backoff_factor": scaler.rule.backoff_factor,
            "growth_interval": scaler.rule.growth_interval,
            "_growth_tracker": scaler.unskipped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set our scaler from GradScaler's state; an empty one is that of a disabled GradScaler.

        Its factors and interval count as those of a GradScaler's making do, see `adopt`.
        """
        if state_dict:
            self._optimizers.settle()
            self._scalers[0].load_state_dict(state_dict)
            self.adopt({name: state_dict[name] for name in _OF_STATE if name in state_dict})

    def adopt(self, options: Mapping[str, Any]) -> None:
        """Let our scaler take over how a `GradScaler` was made, or how one was that is loaded.

        Where `amp.initialize` was told how to scale, that counts, and a warning says so. A scale
        that was loaded, or has moved, stays.

        Args:
            options: init_scale, growth_factor, backoff_factor and growth_interval; those of its
                making where they are not torch's defaults.
        """
        scaler = self._scalers[0]
        if not options or (not scaler.rule.dynamic and scaler.rule.init_scale == 1.0):
            return
        if scaler.rule in (ScaleRule(), self._adopted):
            is_new = scaler.unskipped == 0 and scaler.scale == scaler.rule.init_scale
            cap = max(scaler.rule.max_loss_scale, options.get("init_scale", 1.0))
            scaler.rule = replace(scaler.rule, **options, max_loss_scale=cap)
            self._adopted = scaler.rule
            if is_new:
                scaler.scale = float(scaler.rule.init_scale)
        elif any(getattr(scaler.rule, name) != value for name, value in options.items()):
            given = ", ".join(f"{name}={value}" for name, value in options.items())
            warn_once(
                "the loss is scaled as amp.initialize() was told, which counts before a "
                f"GradScaler; got GradScaler({given}). Give the one or the other: "
                "amp.initialize(..., loss_scale=...), or GradScaler's own options."
            )

    def option(self, name: str) -> Any:
        """Return ``growth_factor``, ``backoff_factor`` or ``growth_interval``."""
        return getattr(self._scalers[0].rule, name)

    def set_option(self, name: str, value: Any) -> None:
        """Set one of these."""
        scaler = self._scalers[0]
        scaler.rule = self._adopted = replace(scaler.rule, **{name: value})

    def _scaling(self, steps: Sequence[OptimizerStep], device: torch.device) -> LossScaling:
        scaling = self._passes.scaling(steps, 0, device, may_be_delayed=True)
        return self._cycle.once(scaling)

    def _step_of(self, optimizer: Any) -> OptimizerStep | None:
        return self._optimizers.steps.get(self._optimizers.originals_of(optimizer))

    def _unscale_other(self, optimizer: Any) -> None:
        """Unscale gradients of a model that was not given to `amp.initialize`, as torch does."""
        if optimizer in self._cycle.checks or not isinstance(optimizer, Optimizer):
            return
        params = params_of(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        self._cycle.checks[optimizer] = kernels.unscale(grads, grads, self._last_scale)
        self._unscaled(params)


def replacements(served: ServedScalers) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method of GradScaler, what makes its replacement."""
    own: dict[str, Callable[..., Any]] = {
        name: _without_scaler(getattr(served, name))
        for name in ("scale", "get_scale", "state_dict", "load_state_dict")
    }
    for name in _OF_STATE:
        own[f"get_{name}"] = _without_scaler(functools.partial(served.option, name))
        own[f"set_{name}"] = _without_scaler(functools.partial(served.set_option, name))
    stages = ScalerStages(served)
    own |= {"unscale_": stages.unscale_, "step": stages.step, "update": stages.update}
    return _replaced("torch.amp.grad_scaler.GradScaler", served, own)


#: The module of the one that FSDP1 asks for.
SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"


def sharded_replacements(served: ServedScalers) -> dict[str, Callable[[Any], Any]]:
    """Return the same for the methods that `ShardedGradScaler` has beside those of GradScaler."""
    stages = ScalerStages(served)
    own: dict[str, Callable[..., Any]] = {
        "scale": _without_scaler(served.scale),
        "unscale_": stages.unscale_,
        "update": stages.update,
    }
    return _replaced(f"{SHARDED}.ShardedGradScaler", served, own)


def _replaced(
    path: str, served: ServedScalers, own: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[[Any], Any]]:
    return {
        f"{path}.{name}": functools.partial(_serving, served, method)
        for name, method in own.items()
    }


def _without_scaler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for which all objects of GradScaler are one."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _options_of(scaler: Any) -> dict[str, Any]:
    """Return how a `GradScaler` was made, where that is not torch's default."""
    given = {name: getattr(scaler, f"_{name}", default) for name, default in _DEFAULTS.items()}
    return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


def _serving(
    served: ServedScalers,
    method: Callable[..., Any],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    is_state = original.__name__ == "state_dict"

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        # One that has scaled nothing is on its way to amp.load_state_dict() perhaps.
        if is_state and self not in served.used:
            with served.off():
                return original(self, *args, **kwargs)
        if not served.serve:
            return original(self, *args, **kwargs)
        if self not in served.used:
            served.used.add(self)
            served.adopt(_options_of(self))
        return method(self, *args, **kwargs)

    return replacement
