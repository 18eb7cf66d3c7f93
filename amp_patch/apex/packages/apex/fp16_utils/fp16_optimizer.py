"""An optimizer over float32 masters of a half model, which scales the loss and skips overflows.

Knows the model only by the parameters it is given; the scale is `LossScaler`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..amp import _amp_state
from ..amp.scaler import LossScaler
from ..optimizers.wrapped_optimizer import WrappedOptimizer
from .fp16util import clip_grad_norm, master_params_to_model_params
from .master_groups import gradient_of, gradients, multiply, put_masters, refuse_other_dtypes

#: What `FP16_Optimizer.state_dict` returns, as apex has it.
_SAVED = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)


class FP16_Optimizer(WrappedOptimizer):
    """Lets an optimizer step float32 masters of the half parameters it was made with.

    The masters take the places of the half parameters in ``init_optimizer.param_groups``;
    parameters in float32 stay there. One iteration::

        optimizer.zero_grad()
        loss = ...
        optimizer.backward(loss)  # the scaled loss; then unscaled gradients into the masters
        optimizer.step()          # nothing after an overflow; else the masters, then the model

    Args:
        init_optimizer: an optimizer of parameters in float16, bfloat16 and float32.
        static_loss_scale: the scale, where it is not dynamic.
        dynamic_loss_scale: whether overflows lower the scale, and their absence raises it.
        dynamic_loss_args: keywords of `LossScaler` for a dynamic scale.
        verbose: whether to print what becomes of each parameter.

    Attributes:
        optimizer: init_optimizer.
        fp16_groups: the model's half parameters, one list for each parameter group.
        fp32_from_fp16_groups: their masters, in the same order.
        fp32_from_fp32_groups: the parameters that are float32 in the model.
        overflow: whether the last backward pass gave an inf or a NaN, by a dynamic scale.
        loss_scaler: the `LossScaler`.

    Raises:
        TypeError: a parameter that wants gradients has another dtype.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        refuse_other_dtypes(self._stepped_params())
        for group in self.param_groups:
            self._take_group(group)
        if self.optimizer.state:  # which was half: loading casts it to the masters' dtype
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = (
            LossScaler("dynamic", **(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._grads_are_scaled_by(half=None, full=None)

    def maybe_print(self, msg: str) -> None:
        """Print a line, if the optimizer is verbose."""
        if self.verbose:
            print(msg)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of the scaled loss, in the place of ``loss.backward()``.

        Several passes before one step add up.

        Args:
            loss: a scalar of any floating dtype.
            update_master_grads: whether the masters' gradients are made at once; with False call
                `update_master_grads` before the step.
            retain_graph: as `torch.Tensor.backward`.
        """
        scale = self.loss_scaler.loss_scale()
        self._bring_grads_to(scale)
        (loss * scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the model's gradients into the masters', look for overflows, move the scale."""
        scaler, scale = self.loss_scaler, self.loss_scaler.loss_scale()
        scaler.clear_overflow_state()
        pairs = list(zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True))
        sources = [param.grad for param, _ in pairs if param.grad is not None]
        targets = [gradient_of(master) for param, master in pairs if param.grad is not None]
        if sources:
            scaler.unscale(sources, targets, scale)
        own = gradients(self.all_fp32_from_fp32_params)
        if own:
            scaler.unscale(own, own, scale, models_are_masters=True)
        self._grads_are_scaled_by(half=scale, full=1.0)
        self.overflow = scaler.update_scale()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them into the model, unless there was an overflow.

        Args:
            closure: clears the gradients, computes the loss, calls ``backward(loss)`` of this
                optimizer and returns the loss. It is called again until it has no overflow.

        Returns:
            What the optimizer's step returns; None where the step was skipped.
        """
        if self.overflow:
            scale = self.loss_scaler.loss_scale()
            _amp_state.maybe_print(
                f"Gradient overflow.  Skipping step, reducing loss scale to {scale}"
            )
            return None
        result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return result

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of the model and of the masters: to 0, or to None."""
        for param in [*self._stepped_params(), *self.all_fp16_params]:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self._grads_are_scaled_by(half=None, full=None)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of the masters' gradients in place.

        Returns:
            The norm of all of them together before clipping; -1 after an overflow.
        """
        if self.overflow:
            return -1
        return self.clip_grad_norm(self._stepped_params(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients, a list for each group; None after an overflow."""
        if self.overflow:
            print(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow "
                "state.  Gradients are currently invalid (may be inf, nan, or stale).  "
                "Returning None."
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer, with masters for its half parameters.

        Raises:
            TypeError: a parameter that wants gradients is not in float16, bfloat16 or float32.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        refuse_other_dtypes(params)
        self.optimizer.add_param_group({**param_group, "params": params})
        self._take_group(self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler itself, the optimizer's state and the masters, to be pickled."""
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the model's own state must have been loaded before.

        The scaler is copied, the masters are filled in place.

        Raises:
            ValueError: the state is of another kind of optimizer, or the masters saved are not as
                many as these; nothing is loaded.
        """
        if missing := [key for key in _SAVED if key not in state_dict]:
            raise ValueError(
                f"a state of apex.fp16_utils.FP16_Optimizer must hold {', '.join(_SAVED)}; got one "
                f"with {list(state_dict)}, without {', '.join(missing)}. Load it into the kind of "
                "optimizer that saved it: optimizer.optimizer.load_state_dict(state) for that of "
                "an optimizer which was not wrapped."
            )
        saved = state_dict["fp32_from_fp16"]
        counts = [len(group) for group in saved]
        mine = [len(group) for group in self.fp32_from_fp16_groups]
        if counts != mine:
            raise ValueError(
                f"a state of FP16_Optimizer must hold {mine} masters in its groups; got {counts}. "
                "Call load_state_dict() on an optimizer of the same model and groups."
            )
        self.loss_scaler = copy.deepcopy(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for masters, values in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(masters, values, strict=True):
                master.data.copy_(value.data)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The parameters of `fp16_groups` in one list."""
        return _joined(self.fp16_groups)

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of `fp32_from_fp16_groups` in one list."""
        return _joined(self.fp32_from_fp16_groups)

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters of `fp32_from_fp32_groups` in one list."""
        return _joined(self.fp32_from_fp32_groups)

    @property
    def loss_scale(self) -> float:
        """The present loss scale; it may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    def __getstate__(self) -> Any:
        raise RuntimeError(
            "FP16_Optimizer cannot be pickled or copied; got a call to pickle or copy it. Save "
            "optimizer.state_dict()."
        )

    def _stepped_params(self) -> list[Tensor]:
        return _joined([group["params"] for group in self.param_groups])

    def _take_group(self, group: dict[str, Any]) -> None:
        self.maybe_print(f"FP16_Optimizer processing param group {len(self.fp16_groups)}:")
        made = put_masters(self.optimizer, group, self.maybe_print)
        self.fp16_groups.append(made.half)
        self.fp32_from_fp16_groups.append(made.masters)
        self.fp32_from_fp32_groups.append(made.full)

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def _grads_are_scaled_by(self, half: float | None, full: float | None) -> None:
        """Note the scales of the gradients there are; None where none need be."""
        self._half_scale, self._full_scale = half, full

    def _bring_grads_to(self, scale: float) -> None:
        """Scale what earlier passes left, so that the next can add to it."""
        if self._half_scale is not None:
            multiply(gradients(self.all_fp16_params), scale / self._half_scale)
        if self._full_scale is not None:
            multiply(gradients(self.all_fp32_from_fp32_params), scale / self._full_scale)
        self._grads_are_scaled_by(half=scale, full=scale)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            if not self.first_closure_call_this_step:
                # The optimizer moved the masters since, and the closure runs the model.
                self._master_params_to_model_params()
            self.first_closure_call_this_step = False
            return self._loss_without_overflow(closure)

        try:
            return self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def _loss_without_overflow(self, closure: Callable[[], Any]) -> Any:
        before = self.loss_scaler.loss_scale()
        loss = closure()
        while self.overflow:
            scale = self.loss_scaler.loss_scale()
            if scale >= before:
                raise RuntimeError(
                    "a closure must give finite gradients at some loss scale; got inf or NaN down "
                    f"to the lowest, {scale}. Look for the inf or NaN in the data and the model, "
                    "or call step() without a closure, which skips."
                )
            print(f"OVERFLOW within closure! Skipping step, reducing loss scale to {scale}")
            before, loss = scale, closure()
        return loss


def _joined(groups: list[list[Tensor]]) -> list[Tensor]:
    return [param for group in groups for param in group]
