"""LAMB as apex had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import amp_C
import torch
from torch import Tensor

from amp_patch.optimizers import registry
from amp_patch.optimizers.lamb import LambUpdate

from ..multi_tensor_apply import multi_tensor_applier
from .group_counters import CountedByGroup
from .multi_tensor_optimizer import (
    MultiTensorOptimizer,
    evaluated,
    gradients_of,
    refuse_amsgrad,
)

__all__ = ["FusedLAMB"]


class FusedLAMB(MultiTensorOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962).

    The state of a parameter is ``exp_avg`` and ``exp_avg_sq``; the group counts in ``step``.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the averages by ``1 - beta ** step``.
        betas: of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        weight_decay: the share of the parameter that is added.
        amsgrad: only False.
        adam_w_mode: add decay to the update, not to the gradient.
        grad_averaging: let the gradient enter its average by ``1 - beta1``, not by 1.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.
        max_grad_norm: all gradients together are clipped to this norm; None or 0: they are not.
        use_nvlamb: scale by the ratio of the norms also without weight decay.

    Raises:
        RuntimeError: amsgrad.
    """

    adam_w_mode = 1
    use_nvlamb = False
    kept = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLAMB", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb

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
        if self._step_by_kernels():
            return loss
        stepped = [(group, self._with_gradients(group)) for group in self.param_groups]
        norm = self._norm([grad for _, params in stepped for grad in gradients_of(params)])
        for group, params in stepped:
            if group["params"]:
                self._step_group(group, params, norm)
        return loss

    def _norm(self, grads: list[Tensor]) -> Tensor:
        flag = torch.zeros_like(self._dummy_overflow_buf)
        total: Tensor = multi_tensor_applier(self.multi_tensor_l2norm, flag, [grads], False)[0]
        return total

    def _step_group(self, group: dict[str, Any], params: list[Tensor], norm: Tensor) -> None:
        beta1, beta2 = group["betas"]
        multi_tensor_applier(
            self.multi_tensor_lamb,
            self._dummy_overflow_buf,
            [gradients_of(params), params, *self._state_of(params, "exp_avg", "exp_avg_sq")],
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            self._count_step(group),
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
            1 if group["grad_averaging"] else 0,
            self.adam_w_mode,
            norm,
            self.defaults["max_grad_norm"],
            self.use_nvlamb,
        )


class FusedLambUpdate(CountedByGroup, LambUpdate):
    """A group of `FusedLAMB`, in the words of `amp_patch.optimizers.FusedLAMB`."""

    @classmethod
    def options(cls, optimizer: Any, group: dict[str, Any]) -> Mapping[str, Any]:
        """See `GroupUpdate.options`."""
        names = ("adam_w_mode", "use_nvlamb")
        return {**group, **{name: getattr(optimizer, name) for name in names}}


registry.register(FusedLAMB, FusedLambUpdate)
