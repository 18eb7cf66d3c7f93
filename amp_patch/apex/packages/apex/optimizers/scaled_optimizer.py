"""What the two FP16_Optimizers of 2019 share: the loss scale, and the order of a step.

How the masters lie, and under which name they are saved, is for the subclasses to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amp_C
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..multi_tensor_apply import multi_tensor_applier
from .explicit_gradients import explicit_gradients
from .wrapped_optimizer import WrappedOptimizer


class ScaledOptimizer(WrappedOptimizer):
    """Scales the loss, steps float32 masters of the parameters, and copies them back.

    Args:
        init_optimizer: holds the (half) parameters; from now on their masters.
        static_loss_scale: what the loss is multiplied by, unless the scale is dynamic.
        dynamic_loss_scale: begin at 2^16, halve after an overflow (down to 1), double after 1000
            steps without one.
        dynamic_loss_args: None, or ``init_scale``, ``scale_factor`` and ``scale_window`` of it.
        verbose: whether overflows are printed.

    Attributes:
        optimizer: the wrapped one.
        fp16_groups: the parameters, a list for each group.
        cur_scale, cur_iter: the scale, and how many calls of ``step`` there were.
        dynamic_loss_scale: as given.
        last_overflow_iter, scale_factor, scale_window: of the dynamic scale.
        overflow: whether the last step was skipped.
        masters_name: the attribute with the masters, which is also their name in a checkpoint.
    """

    masters_name: str

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.fp16_groups = self._put_masters(init_optimizer.param_groups)
        options = dynamic_loss_args or {}
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = (
            options.get("init_scale", 2.0**16) if dynamic_loss_scale else static_loss_scale
        )
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = options.get("scale_factor", 2)
        self.scale_window = options.get("scale_window", 1000)
        self.verbose = verbose
        self.overflow = False

    def _put_masters(self, groups: list[dict[str, Any]]) -> list[list[Tensor]]:
        """Put masters in the places of the parameters of each group; return the parameters."""
        raise NotImplementedError

    def _targets(self) -> list[list[Tensor]]:
        """Return what the masters of each group are copied to after a step."""
        raise NotImplementedError

    def _gradients(self) -> list[list[Tensor | None]]:
        """Return the gradient of each master of each group, multiplied by the scale."""
        raise NotImplementedError

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
        """Step the masters by the gradients of the parameters, unless one is not finite.

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
        grads = self._gradients()
        self.overflow = _has_nonfinite([g for group in grads for g in group if g is not None])
        if not self.overflow:
            groups = self.optimizer.param_groups
            with explicit_gradients(groups, grads, self.cur_scale, self._targets()):
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state: of the scale, of the wrapped optimizer, and the masters themselves."""
        names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
        if self.dynamic_loss_scale:
            names += ["last_overflow_iter", "scale_factor", "scale_window"]
        state = {name: getattr(self, name) for name in names}
        state["optimizer_state_dict"] = self.optimizer.state_dict()
        state[self.masters_name] = getattr(self, self.masters_name)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or apex's; the masters are loaded in place.

        The parameters are as the model's own state says, which is to be loaded, too.

        Raises:
            ValueError: the masters saved are others than these, or none; nothing is loaded.
        """
        pairs = self._pairs(state_dict)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.cur_scale = state_dict["cur_scale"]
        self.cur_iter = state_dict["cur_iter"]
        if self.dynamic_loss_scale:
            self.last_overflow_iter = state_dict["last_overflow_iter"]
            self.scale_factor = state_dict["scale_factor"]
            self.scale_window = state_dict["scale_window"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for master, value in pairs:
            master.copy_(value)

    def _pairs(self, state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Return each master with its saved value."""
        kind = type(self)
        name = f"{kind.__module__.rpartition('.')[0]}.{kind.__qualname__}"
        if self.masters_name not in state_dict:
            raise ValueError(
                f"a state of {name} must hold {self.masters_name!r}; got {list(state_dict)}. "
                "apex.optimizers.FP16_Optimizer saves 'fp32_groups_flat', "
                "apex.contrib.optimizers.FP16_Optimizer 'fp32_groups', and "
                "apex.fp16_utils.FP16_Optimizer 'fp32_from_fp16'; load it into the one that saved "
                "it."
            )
        ours = _in_one_list(getattr(self, self.masters_name))
        saved = _in_one_list(state_dict[self.masters_name])
        shapes = [[tuple(one.shape) for one in tensors] for tensors in (ours, saved)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"a state of {name} must hold masters of the shapes {shapes[0]}; got {shapes[1]}. "
                "Call load_state_dict() on an optimizer of the same model and groups."
            )
        return list(zip(ours, saved, strict=True))


def _in_one_list(masters: list[Any]) -> list[Tensor]:
    """Return masters that lie in a list, or in a list for each group, in one list."""
    return [m for one in masters for m in ([one] if isinstance(one, Tensor) else one)]


def _has_nonfinite(grads: list[Tensor]) -> bool:
    """Return whether gradients hold inf or NaN. Waits for the device."""
    if not grads:
        return False
    flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
    return int(flag) != 0
