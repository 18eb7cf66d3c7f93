"""Adagrad as apex had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import amp_C
import torch

from ..multi_tensor_apply import multi_tensor_applier
from .multi_tensor_optimizer import MultiTensorOptimizer, evaluated, gradients_of

__all__ = ["FusedAdagrad"]


class FusedAdagrad(MultiTensorOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011), by the formula of `torch.optim.Adagrad`.

    The state of a parameter is ``sum``, of the squares of its gradients.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        eps: added to the root of the sum.
        weight_decay: the share of the parameter that is added.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.
        adagrad_w_mode: add decay to the update, as AdamW does, not to the gradient.
    """

    adagrad_w_mode = 0
    kept = ("set_grad_none", "adagrad_w_mode")
    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the loss again, and is evaluated once.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            params = self._with_gradients(group)
            multi_tensor_applier(
                self.multi_tensor_adagrad,
                self._dummy_overflow_buf,
                [gradients_of(params), params, *self._state_of(params, "sum")],
                group["lr"],
                group["eps"],
                self.adagrad_w_mode,
                group["weight_decay"],
            )
        return loss
