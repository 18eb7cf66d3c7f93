"""SGD as apex had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import amp_C
import torch
from torch import Tensor
from torch.optim.optimizer import required

from amp_patch.optimizers import registry
from amp_patch.optimizers.groups import StepInputs
from amp_patch.optimizers.sgd import SgdUpdate

from ..multi_tensor_apply import multi_tensor_applier
from .explicit_gradients import explicit_gradients
from .multi_tensor_optimizer import MultiTensorOptimizer, evaluated, gradients_of

__all__ = ["FusedSGD"]


class FusedSGD(MultiTensorOptimizer):
    """SGD with momentum, by the formula of `torch.optim.SGD`.

    The state of a parameter is ``momentum_buffer`` of its own dtype, where there is momentum. With
    powers of two as options half parameters get the very bits that `torch.optim.SGD` gives them.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum, dampening, weight_decay, nesterov: as of `torch.optim.SGD`.
        wd_after_momentum: add decay to what is subtracted, not to what is averaged.
        materialize_master_grads: kept as an attribute; masters always have their gradients.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.

    Attributes:
        most_recent_scale: 1.0; gradients are unscaled before they come here.
        scale_set_by_backward: False, for that reason.

    Raises:
        ValueError: a negative lr, momentum or weight_decay; nesterov without momentum, or with
            dampening.
    """

    has_wide_state = False
    wd_after_momentum = False
    materialize_master_grads = True
    most_recent_scale = 1.0
    scale_set_by_backward = False
    kept = ("set_grad_none", "wd_after_momentum", "materialize_master_grads")
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        _refuse_numbers(numbers, dampening, nesterov)
        defaults = {**numbers, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, defaults, set_grad_none)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | Tensor = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the loss again, and is evaluated once.
            grads, output_params, scale: of 2019: other gradients than the parameters have, copies
                to be made, and what gradients are divided by; see `explicit_gradients`.
            grad_norms: of 2019; without effect.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = evaluated(closure)
        with explicit_gradients(self.param_groups, grads, scale, output_params):
            if self._step_by_kernels():
                return loss
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = self._with_gradients(group)
        if group["momentum"] == 0:
            self._step_params(group, params, gradients_of(params), True)  # not looked at
            return
        known = [self.state[param].get("momentum_buffer") is not None for param in params]
        for is_first in (False, True):
            part = [param for param, knows in zip(params, known, strict=True) if knows != is_first]
            (momenta,) = self._state_of(part, "momentum_buffer")
            self._step_params(group, part, momenta, is_first)

    def _step_params(
        self, group: dict[str, Any], params: list[Tensor], momenta: list[Tensor], is_first: bool
    ) -> None:
        multi_tensor_applier(
            self.multi_tensor_sgd,
            # On the CPU, where its value is known without waiting.
            torch.zeros(1, dtype=torch.int32, device="cpu"),
            [gradients_of(params), params, momenta],
            group["weight_decay"],
            group["momentum"],
            group["dampening"],
            group["lr"],
            group["nesterov"],
            is_first,
            self.wd_after_momentum,
            1.0,
        )

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the momenta of parameters, and whether the last of them had none before."""
        found = list(params)
        first = [self.state[param].get("momentum_buffer") is None for param in found]
        return self._state_of(found, "momentum_buffer")[0], bool(first and first[-1])


def _refuse_numbers(numbers: dict[str, Any], dampening: float, nesterov: bool) -> None:
    for name, number in numbers.items():
        if number is not required and number < 0.0:
            raise ValueError(
                f"{name} must be at least 0; got {number!r}; call FusedSGD(..., {name}=0.1)."
            )
    if nesterov and (numbers["momentum"] <= 0 or dampening != 0):
        raise ValueError(
            "Nesterov momentum requires a momentum and zero dampening; got "
            f"momentum={numbers['momentum']!r}, dampening={dampening!r}; call "
            "FusedSGD(..., momentum=0.9, dampening=0, nesterov=True)."
        )


class FusedSgdUpdate(SgdUpdate):
    """A group of `FusedSGD`, in the words of torch's SGD."""

    @classmethod
    def options(cls, optimizer: Any, group: dict[str, Any]) -> Mapping[str, Any]:
        """See `GroupUpdate.options`."""
        decoupled = optimizer.wd_after_momentum
        return {**group, "maximize": False, "decoupled_weight_decay": decoupled}

    def suits_reference(self, inputs: StepInputs) -> bool:
        """See `GroupUpdate.suits_reference`: the optimizer's own step is the reference."""
        return False


registry.register(FusedSGD, FusedSgdUpdate)
