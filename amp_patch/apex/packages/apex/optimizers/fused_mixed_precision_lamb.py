"""LAMB that keeps float32 copies of half parameters, as apex had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import amp_C
import torch
from torch import Tensor

from ..multi_tensor_apply import multi_tensor_applier
from .grad_scaling import scaling_of
from .multi_tensor_optimizer import (
    MultiTensorOptimizer,
    evaluated,
    gradients_of,
    refuse_amsgrad,
)

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(MultiTensorOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962), which unscales and skips for itself.

    The state of a parameter is ``exp_avg`` and ``exp_avg_sq``. The group holds ``lr`` and
    ``step`` as tensors on the parameters' device.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        step: how many steps there were.
        bias_correction: divide the averages by ``1 - beta ** step``.
        betas: of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        weight_decay: the share of the parameter that is added.
        amsgrad: only False.
        adam_w_mode: add decay to the update, not to the gradient.
        grad_averaging: let the gradient enter its average by ``1 - beta1``, not by 1.
        max_grad_norm: all gradients together are clipped to this norm; 0: they are not.
        use_nvlamb: scale by the ratio of the norms also without weight decay.
        reduced_precision_dtype: of the parameters that get a float32 copy, at the first step.

    Raises:
        RuntimeError: amsgrad.
    """

    adam_w_mode = 1
    use_nvlamb = False
    reduced_precision_dtype: torch.dtype | None = None
    kept = ("set_grad_none", "adam_w_mode", "use_nvlamb", "reduced_precision_dtype", "_masters")
    _step_supports_amp_scaling = True
    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb_mp)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_amsgrad("FusedMixedPrecisionLamb", amsgrad)
        defaults = {
            "lr": lr,
            "step": step,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, True)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        self._masters: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            _put_on_device(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Step all parameters that have gradients. Waits for the device.

        Args:
            closure: evaluates the loss again, and is evaluated once.
            grad_scaler: the `torch.amp.GradScaler` in use.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = evaluated(closure)
        stepped = [(group, self._with_gradients(group)) for group in self.param_groups]
        grads = [grad for _, params in stepped for grad in gradients_of(params)]
        if not grads:
            return loss
        found_inf, inverse = scaling_of(self, grad_scaler, grads[0].device)
        noop = (found_inf != 0).to(torch.int32)
        self._dummy_overflow_buf = noop
        norm = multi_tensor_applier(self.multi_tensor_l2norm, noop.clone(), [grads], False)[0]
        limit = torch.full_like(norm, self.defaults["max_grad_norm"] or 0.0) / inverse
        for group, params in stepped:
            _put_on_device(group)
            group["step"].add_(1 - noop.to(group["step"].device))
            self._step_group(group, params, (norm, limit), (found_inf, inverse))
        return loss

    def _step_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        norms: tuple[Tensor, Tensor],
        scaling: tuple[Tensor, Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        lists = [
            gradients_of(params),
            [self._master_of(param) for param in params],
            *self._state_of(params, "exp_avg", "exp_avg_sq"),
            params,
        ]
        multi_tensor_applier(
            self.multi_tensor_lamb,
            self._dummy_overflow_buf,
            lists if self.reduced_precision_dtype is not None else lists[:4],
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["step"],
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
            1 if group["grad_averaging"] else 0,
            self.adam_w_mode,
            *norms,
            self.use_nvlamb,
            *scaling,
        )

    def _master_of(self, param: Tensor) -> Tensor:
        """Return the float32 copy of a parameter that has one, and any other itself."""
        if param.dtype is not self.reduced_precision_dtype:
            return param
        if param not in self._masters:
            self._masters[param] = param.detach().to(torch.float32, copy=True)
        return self._masters[param]


def _put_on_device(group: dict[str, Any]) -> None:
    """Make lr and step of a group tensors, where its parameters are."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    kinds = (("lr", torch.float32), ("step", torch.int32))
    for name, dtype in kinds:
        value = group[name]
        is_there = isinstance(value, Tensor) and value.device == device
        if not is_there:
            group[name] = torch.as_tensor(value, dtype=dtype).to(device, copy=True).reshape(-1)
    group["lr"] = group["lr"].reshape(())
