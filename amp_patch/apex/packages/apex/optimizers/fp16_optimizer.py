"""The wrapper of 2019 that trains half parameters through float32 copies; knows no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amp_C
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..multi_tensor_apply import multi_tensor_applier
from .explicit_gradients import explicit_gradients

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer:
    """Scales the loss, steps float32 copies of the parameters, and copies them back.

    Args:
        init_optimizer: holds the (half) parameters; from now on their copies.
        static_loss_scale: what the loss is multiplied by, unless the scale is dynamic.
        dynamic_loss_scale: begin at 2^16, halve after an overflow (down to 1), double after 1000
            steps without one.
        dynamic_loss_args: None, or ``init_scale``, ``scale_factor`` and ``scale_window`` of it.
        verbose: whether overflows are printed.

    Attributes:
        optimizer: the wrapped one.
        fp16_groups, fp32_groups: parameters and their copies, a list for each group.
        cur_scale, cur_iter: the scale, and how many calls of ``step`` there were.
        dynamic_loss_scale: as given.
        last_overflow_iter, scale_factor, scale_window: of the dynamic scale.
        overflow: whether the last step was skipped.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.fp16_groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self.fp32_groups = [[_copy(param) for param in group] for group in self.fp16_groups]
        for group, copies in zip(init_optimizer.param_groups, self.fp32_groups, strict=True):
            group["params"] = copies
        options = dynamic_loss_args or {}
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = (
            options.get("init_scale", 2.0**16) if dynamic_loss_scale else (static_loss_scale)
        )
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = options.get("scale_factor", 2)
        self.scale_window = options.get("scale_window", 1000)
        self.verbose = verbose
        self.overflow = False

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss (one element), multiplied by the scale in float32."""
        (loss.float() * self.cur_scale).backward()

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of the half parameters."""
        for group in self.fp16_groups:
            for param in group:
                if set_grads_to_None or param.grad is None:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step the copies by the gradients of the parameters, unless one is not finite.

        Args:
            closure: only None.

        Raises:
            RuntimeError: a closure.
        """
        if closure is not None:
            raise RuntimeError(
                "this FP16_Optimizer steps without a closure; got one; call loss = closure(), "
                "optimizer.backward(loss), optimizer.step()."
            )
        grads = [[param.grad for param in group] for group in self.fp16_groups]
        self.overflow = _has_nonfinite([g for group in grads for g in group if g is not None])
        if not self.overflow:
            groups = self.optimizer.param_groups
            with explicit_gradients(groups, grads, self.cur_scale, self.fp16_groups):
                self.optimizer.step()
        self._update_scale(self.overflow)

    def _update_scale(self, skip: bool) -> None:
        if skip and self.verbose:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            print(f"\nGrad overflow on iteration {self.cur_iter}")
            print(f"Using {kind} loss scale of {self.cur_scale}")
        if self.dynamic_loss_scale and skip:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif self.dynamic_loss_scale:
            since = self.cur_iter - self.last_overflow_iter
            self.cur_scale *= self.scale_factor if since % self.scale_window == 0 else 1
        self.cur_iter += 1

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return self.cur_scale

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer, which hold the copies."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state: of the scale, of the wrapped optimizer, and the copies themselves."""
        names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
        if self.dynamic_loss_scale:
            names += ["last_overflow_iter", "scale_factor", "scale_window"]
        state = {name: getattr(self, name) for name in names}
        state["optimizer_state_dict"] = self.optimizer.state_dict()
        state["fp32_groups"] = self.fp32_groups
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the copies are loaded in place."""
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.cur_scale = state_dict["cur_scale"]
        self.cur_iter = state_dict["cur_iter"]
        if self.dynamic_loss_scale:
            self.last_overflow_iter = state_dict["last_overflow_iter"]
            self.scale_factor = state_dict["scale_factor"]
            self.scale_window = state_dict["scale_window"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for ours, saved in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
            for copy, value in zip(ours, saved, strict=True):
                copy.copy_(value)


def _copy(param: Tensor) -> Tensor:
    return param.detach().to(torch.float32, copy=True).requires_grad_(param.requires_grad)


def _has_nonfinite(grads: list[Tensor]) -> bool:
    """Return whether gradients hold inf or NaN. Waits for the device."""
    if not grads:
        return False
    flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    return int(flag) != 0
