"""What scripts reach for on an optimizer that apex.amp initialized: a view of amp_patch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.common.warn_once import warn_once
from amp_patch.levels import HALVES
from amp_patch.patching import Patches
from amp_patch.scaling.loss_scaler import LossScaler as CoreScaler
from amp_patch.session import session
from amp_patch.step.optimizer_step import OptimizerStep

from ._amp_state import _amp_state
from .scaler import LossScaler, view_of

__all__ = [
    "AmpOptimizerState",
    "attach",
    "post_backward_models_are_masters",
    "renew_scalers",
    "step_of",
    "tell_of_own_methods",
]


class AmpOptimizerState:
    """``optimizer._amp_stash``; lists are made when they are read.

    For scripts with a ``scale_loss`` of their own, two of the properties may be set.

    Attributes:
        lazy_init_called: True; masters are made by `initialize`. May be set.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = True
        self.dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)

    def _step(self) -> OptimizerStep:
        return step_of(self._optimizer())

    @property
    def already_patched(self) -> bool:
        """Whether the next step is to be skipped; what is set here decides about it."""
        return self._step().skip.is_certain

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        skip = self._step().skip
        skip.forget()
        skip.is_certain = bool(value)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether the last ``scale_loss`` had ``delay_unscale``.

        Set to True, the gradients stay scaled for the next backward to add to; set to False, the
        script has unscaled them.
        """
        return self._step().backward.gradients.scaled.scale is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        backward = self._step().backward
        if backward.current.is_open or (value and not self.params_have_scaled_gradients):
            backward.leave_scaled(self._scale())
        if not value:
            backward.gradients.scaled.forget()

    def _scale(self) -> float:
        return session.scalers[self._step().scalers[0]].loss_scale()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The half parameters of each group that have masters."""
        return self._groups(lambda param, stepped: param if param is not stepped else None)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of each group."""
        return self._groups(lambda param, stepped: stepped if param is not stepped else None)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The fp32 parameters of each group, which are stepped themselves."""
        return self._groups(lambda param, stepped: stepped if param is stepped else None)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The model's half parameters."""
        return [param for param in self._step().backward.pairs().model if param.dtype in HALVES]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The model's fp32 parameters."""
        return [
            param for param in self._step().backward.pairs().model if param.dtype is torch.float32
        ]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The fp32 parameters that are stepped themselves."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp16_grad_stash(self) -> list[None]:
        """One None for each half parameter: amp_patch keeps no gradients here."""
        return [None] * len(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[None]:
        """One None for each fp32 parameter."""
        return [None] * len(self.all_fp32_params)

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[None]:
        """One None for each fp32 parameter that is stepped itself."""
        return [None] * len(self.all_fp32_from_fp32_params)

    def _groups(self, pick: Callable[[Tensor, Tensor], Tensor | None]) -> list[list[Tensor]]:
        step, result = self._step(), []
        masters, optimizer = step.masters, step.optimizer
        for group in [] if optimizer is None else optimizer.param_groups:
            stepped = group["params"]
            params = stepped if masters is None else list(map(masters.pairs.param_of, stepped))
            picked = [pick(param, one) for param, one in zip(params, stepped, strict=True)]
            result.append([tensor for tensor in picked if tensor is not None])
        return result

    def lazy_init(self) -> None:
        """Do nothing: `initialize` made the masters."""

    def publish(self) -> None:
        """Copy the masters to the model's half parameters."""
        masters = self._step().masters
        if masters is not None:
            masters.publish()

    def prepare_backward(self) -> None:
        """Make room for scaled gradients, where no ``scale_loss`` does it."""
        backward = self._step().backward
        backward.begin(backward.pairs(), self._scale())

    def post_backward(self, loss_scaler: LossScaler) -> None:
        """Unscale the gradients and tell the scaler of overflows; it does not move yet."""
        backward = self._step().backward
        taken = backward.receive(backward.pairs(), loss_scaler.loss_scale())
        backward.gradients.passes.finish(taken)
        loss_scaler.note(taken.check)


def step_of(optimizer: Any) -> OptimizerStep:
    """Return what was set up for an optimizer; of a sharded one, for this rank's share."""
    step: OptimizerStep = session.optimizers.steps[session.optimizers.originals_of(optimizer)]
    return step


def attach(optimizer: Optimizer) -> None:
    """Put on an optimizer what scripts find on apex's, until `amp.deactivate`."""
    stash = AmpOptimizerState(optimizer)
    patches = Patches()
    for name, value in {
        "_amp_stash": stash,
        "_amp_lazy_init": stash.lazy_init,
        "_lazy_init_maybe_master_weights": stash.lazy_init,
        "_master_params_to_model_params": stash.publish,
        "_post_amp_backward": stash.post_backward,
        "_prepare_amp_backward": stash.prepare_backward,
    }.items():
        patches.replace(optimizer, name, value)
    session.call_at_deactivate(patches.undo, of=optimizer)


def post_backward_models_are_masters(
    scaler: LossScaler,
    params: Sequence[Tensor],
    stashed_grads: list[Tensor | None],
    scale_override: tuple[float, float, float] | None = None,
) -> None:
    """Unscale gradients in place, and add those that were set aside before the backward.

    Args:
        scaler: whose scale they have; told of overflows.
        params: fp32, with scaled gradients or none.
        stashed_grads: what was set aside of each, unscaled; all None in the end.
        scale_override: the scales that the gradients have, that the stashed ones have, and that
            the results get.
    """
    grads_have, stashed_have, out = scale_override or (scaler.loss_scale(), 1.0, 1.0)
    new, both, earlier = [], [], []
    for param, stashed in zip(params, stashed_grads, strict=True):
        if param.grad is None:
            param.grad = stashed
        elif stashed is None:
            new.append(param.grad)
        else:
            both.append(param.grad)
            earlier.append(stashed)
    if new:
        scaler.unscale(new, new, models_are_masters=True, scale_override=grads_have / out)
    if both:
        scaler.unscale_with_stashed(both, earlier, both, (grads_have, stashed_have, out))
    stashed_grads[:] = [None] * len(stashed_grads)


def tell_of_own_methods(optimizers: Any) -> None:
    """Warn, once, of methods that a script put on an optimizer and `amp.scale_loss` calls not.

    Args:
        optimizers: one, or a list or tuple of them.
    """
    for optimizer in optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,):
        stash = getattr(optimizer, "_amp_stash", None)
        if not isinstance(stash, AmpOptimizerState):
            continue
        for name, ours in (
            ("_prepare_amp_backward", stash.prepare_backward),
            ("_post_amp_backward", stash.post_backward),
        ):
            if getattr(optimizer, name, ours) != ours:
                warn_once(
                    "scale_loss() unscales gradients itself, and calls no method of an optimizer "
                    f"for it; got an optimizer of type {type(optimizer).__name__} with {name} of "
                    "the script's own, which is not called. Leave it out; what it is to change "
                    "beside that, change at amp.master_params(optimizer) after the block. "
                    "Gradients from before the block count as unscaled: where the script has "
                    "scaled these, let it set optimizer._amp_stash.params_have_scaled_gradients = "
                    "True before the block."
                )


def renew_scalers(optimizer: Optimizer) -> None:
    """Start the scales of an optimizer's losses anew; its scalers become those of ``_amp_state``.

    They come first in the process's list, which apex made anew in each call of `initialize`.
    Earlier optimizers use them too, for losses of the same numbers; where another rule moves the
    scale of theirs they keep their own.
    """
    session.settle()
    latest = step_of(optimizer).scalers
    fresh = [CoreScaler(session.scalers[latest[loss_id]].rule) for loss_id in sorted(latest)]
    for scaler in fresh:
        view_of(scaler)  # whose class a script may have changed

    def instead(loss_id: int, index: int, scaler: CoreScaler) -> CoreScaler:
        is_shared = loss_id < len(fresh) and fresh[loss_id].rule == scaler.rule
        return fresh[loss_id] if is_shared else scaler

    session.optimizers.scalers.put_first(fresh, instead)
    _amp_state.num_losses = len(fresh)
