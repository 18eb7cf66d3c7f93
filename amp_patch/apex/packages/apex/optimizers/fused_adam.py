"""Adam and AdamW as apex had them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import amp_C
import torch
from torch import Tensor

from amp_patch.optimizers import registry
from amp_patch.optimizers.adam import AdamUpdate

from ..multi_tensor_apply import multi_tensor_applier
from .deprecated_adam import deprecated_adam
from .explicit_gradients import explicit_gradients, group_norms
from .grad_scaling import scaling_of
from .group_counters import CountedByGroup
from .multi_tensor_optimizer import (
    MultiTensorOptimizer,
    evaluated,
    gradients_of,
    refuse_amsgrad,
)

__all__ = ["FusedAdam"]


class FusedAdam(MultiTensorOptimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), by default with AdamW's decay (arXiv:1711.05101).

    The state of a parameter is ``exp_avg`` and ``exp_avg_sq``; the group counts in ``step``.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; a tensor of one element where it is capturable.
        bias_correction: divide the averages by ``1 - beta ** step``.
        betas: of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        adam_w_mode: add decay to the update, not to the gradient.
        weight_decay: the share of the parameter that is added.
        amsgrad: only False.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.
        capturable: keep lr and step on the device, and never wait for it.
        master_weights: keep float32 copies of the parameters, and step those.
        max_grad_norm: of 2019: clip the gradients of each group to this norm; None or 0: not.
        eps_inside_sqrt: of 2019: add eps to the average of squares, not to its root.
        use_mt, amp_scale_adjustment: of 2019; without effect.

    Who gives one of the arguments of 2019 gets the formula of then; see `deprecated_adam`.

    Attributes:
        eps_mode: 0 or 1, whether eps is added outside of the root; None: by today's formula.

    Raises:
        RuntimeError: amsgrad, masters without capturable, or an argument of 2019 together with
            adam_w_mode=False or capturable.
    """

    eps_mode: int | None = None

    adam_w_mode = 1
    capturable = False
    master_weights = False
    kept = ("set_grad_none", "adam_w_mode", "capturable", "master_weights", "eps_mode", "_masters")
    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
        eps_inside_sqrt: bool | None = None,
        use_mt: bool | None = None,
        amp_scale_adjustment: float | None = None,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        given = (max_grad_norm, eps_inside_sqrt, use_mt, amp_scale_adjustment)
        is_of_2019 = any(argument is not None for argument in given)
        _refuse_options(capturable, master_weights, bool(adam_w_mode), is_of_2019)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if max_grad_norm is not None:
            defaults["max_grad_norm"] = max_grad_norm
        super().__init__(params, defaults, set_grad_none)
        self.eps_mode = int(not eps_inside_sqrt) if is_of_2019 else None
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        for group in self.param_groups if capturable else ():
            number = float(group["lr"])
            group["lr"] = torch.tensor(number, device=self._device(), dtype=torch.float32)
        self._masters: dict[Tensor, Tensor] = {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Where torch's GradScaler looks whether it may leave unscaling and skipping to us."""
        return self.capturable

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | Tensor | None = None,
        grad_norms: Iterable[Any] | None = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the loss again, and is evaluated once.
            grads, output_params, scale: of 2019: other gradients than the parameters have, copies
                to be made, and what gradients are divided by; see `explicit_gradients`.
            grad_norms: of 2019: the norm of each group's gradients, before the division.
            grad_scaler: the `torch.amp.GradScaler` in use; only where it is capturable.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = evaluated(closure)
        divisor = 1.0 if scale is None else scale
        norms = group_norms(grad_norms, self.param_groups)
        with explicit_gradients(self.param_groups, grads, divisor, output_params):
            if self._step_by_kernels():
                return loss
            for group, norm in zip(self.param_groups, norms, strict=True):
                if self.capturable:
                    self._step_capturable(group, grad_scaler)
                elif group["params"]:
                    self._step_group(group, None if norm is None else norm / divisor)
        return loss

    def _step_group(self, group: dict[str, Any], norm: Any) -> None:
        params = self._with_gradients(group)
        step = self._count_step(group)
        lists = [gradients_of(params), params, *self._state_of(params, "exp_avg", "exp_avg_sq")]
        if group.get("max_grad_norm", 0.0) > 0 and params:
            lists[0] = _clipped(lists[0], group["max_grad_norm"], norm)
        if self.eps_mode is not None:
            deprecated_adam(
                lists,
                group["lr"],
                group["betas"],
                group["eps"],
                step,
                eps_inside_sqrt=self.eps_mode == 0,
                bias_correction=group["bias_correction"],
                weight_decay=group["weight_decay"],
            )
            return
        options = self._options(group, step)
        multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists, *options)

    def _options(self, group: dict[str, Any], step: Any) -> tuple[Any, ...]:
        beta1, beta2 = group["betas"]
        correct = 1 if group["bias_correction"] else 0
        rest = (self.adam_w_mode, correct, group["weight_decay"])
        return (group["lr"], beta1, beta2, group["eps"], step, *rest)

    def _step_capturable(self, group: dict[str, Any], grad_scaler: Any) -> None:
        params = self._with_gradients(group)
        if not params:
            return
        device = params[0].device
        found_inf, inverse = scaling_of(self, grad_scaler, device)
        noop = (found_inf != 0).to(torch.int32)
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        before = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=device)
        group["step"] = before.reshape(1).add_(1 - noop)  # in place: a CUDA graph counts, too
        lists = [gradients_of(params), params, *self._state_of(params, "exp_avg", "exp_avg_sq")]
        operation = self.multi_tensor_adam_capturable
        if self.master_weights:
            operation = self.multi_tensor_adam_capturable_master
            lists.append([self._master_of(param) for param in params])
        options = self._options(group, group["step"])
        multi_tensor_applier(operation, noop, lists, *options, inverse)

    def _master_of(self, param: Tensor) -> Tensor:
        if param not in self._masters:
            self._masters[param] = param.detach().to(torch.float32, copy=True)
        return self._masters[param]


def _clipped(grads: list[Tensor], max_norm: float, norm: Any) -> list[Tensor]:
    """Return gradients of which the norm of all is at most ``max_norm``."""
    if norm is None:
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        norm = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)[0]
    total = torch.as_tensor(norm, dtype=torch.float32).reshape(())
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    return [grad * factor.to(grad.device) for grad in grads]


def _refuse_options(
    capturable: bool, master_weights: bool, adam_w_mode: bool, is_of_2019: bool
) -> None:
    if master_weights and not capturable:
        raise RuntimeError(
            "FusedAdam keeps master weights only where it is capturable; got "
            "master_weights=True, capturable=False; call FusedAdam(..., capturable=True, "
            "master_weights=True), or amp.initialize(..., opt_level='O2')."
        )
    if is_of_2019 and (capturable or not adam_w_mode):
        other = "capturable=True" if capturable else "adam_w_mode=False"
        raise RuntimeError(
            "the FusedAdam of 2019 is not capturable, and adds decay to the update; got "
            f"max_grad_norm, eps_inside_sqrt, use_mt or amp_scale_adjustment and {other}; leave "
            "out the one or the other."
        )


class FusedAdamUpdate(CountedByGroup, AdamUpdate):
    """A group of `FusedAdam`, in the words of torch's Adam."""

    @classmethod
    def options(cls, optimizer: Any, group: dict[str, Any]) -> Mapping[str, Any]:
        """See `GroupUpdate.options`."""
        return {
            **group,
            "decoupled_weight_decay": bool(optimizer.adam_w_mode),
            "amsgrad": False,
            "maximize": False,
            "capturable": optimizer.capturable,
            "eps_mode": getattr(optimizer, "eps_mode", None),
        }

    @classmethod
    def suits_kernels(cls, options: Mapping[str, Any]) -> bool:
        """See `GroupUpdate.suits_kernels`; not what is of 2019, nor what is to be captured."""
        is_of_2019 = options["eps_mode"] is not None or options.get("max_grad_norm", 0.0) > 0
        return super().suits_kernels(options) and not (is_of_2019 or options["capturable"])


registry.register(FusedAdam, FusedAdamUpdate)
