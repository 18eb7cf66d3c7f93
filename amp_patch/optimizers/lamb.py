"""Optimizers that torch has not; knows no scales, masters or CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_patch.kernels import torch_optimizers
from amp_patch.kernels.torch_kernels import alike

__all__ = ["FusedLAMB"]

_HALVES = (torch.float16, torch.bfloat16)
_DEFAULTS = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}


class FusedLAMB(Optimizer):
    """LAMB (You et al. 2019, arXiv:1904.00962), with the arguments and defaults of apex's.

    Its state is per parameter, as that of torch's Adam: ``exp_avg`` and ``exp_avg_sq`` like the
    parameter, and ``step``, a 0-dim float32 tensor. State that apex saved, with ``step`` in the
    group, loads too. Half parameters are stepped in fp32 and rounded.

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
        ValueError: a negative lr, eps, weight_decay or max_grad_norm; a beta outside of [0, 1).
    """

    set_grad_none = True

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
        if amsgrad:
            raise RuntimeError(
                "LAMB has no AMSGrad variant; got amsgrad=True. Leave it out, or use "
                "torch.optim.AdamW(..., amsgrad=True)."
            )
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        _refuse_negative({**numbers, "max_grad_norm": max_grad_norm or 0.0})
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"betas must be at least 0 and below 1; got {betas!r}; call "
                "FusedLAMB(..., betas=(0.9, 0.999))."
            )
        self.set_grad_none = set_grad_none
        defaults = {
            **numbers,
            "betas": betas,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state; apex's groups count the steps and lack what is set for all."""
        super().__setstate__(state)
        for group in self.param_groups:
            steps = group.pop("step", None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                entry = self.state.get(param)
                if entry and "step" not in entry:
                    entry["step"] = torch.tensor(float(steps or 0))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, as ``set_grad_none`` says unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [
            (group, [param for param in group["params"] if param.grad is not None])
            for group in self.param_groups
        ]
        factor = self._clip_factor([param.grad for _, params in stepped for param in params])
        for group, params in stepped:
            for (part,) in alike(params):
                self._step_alike(group, part, factor)
        return loss

    def _clip_factor(self, grads: list[Tensor]) -> Tensor | None:
        if any(grad.is_sparse for grad in grads):
            raise RuntimeError(
                "LAMB needs dense gradients; got a sparse one. Build the embedding with "
                "sparse=False, or give its weight to torch.optim.SparseAdam."
            )
        max_norm = self.defaults["max_grad_norm"]
        return torch_optimizers.clip_factor(grads, max_norm) if max_norm and grads else None

    def _step_alike(
        self, group: dict[str, Any], params: list[Tensor], factor: Tensor | None
    ) -> None:
        entries = [self._state_of(param) for param in params]
        grads: list[Any] = [param.grad for param in params]
        columns = [[entry[name] for entry in entries] for name in ("exp_avg", "exp_avg_sq")]
        steps = [entry["step"] for entry in entries]
        torch._foreach_add_(steps, 1)
        stored = [params, *columns]
        exact = [grads, *stored]
        if params[0].dtype in _HALVES:
            exact = [[tensor.float() for tensor in column] for column in exact]
        grads = exact[0] if factor is None else _scaled(exact[0], factor)
        counts = [float(step) for step in steps]
        _, masters, exp_avgs, exp_avg_sqs = exact
        torch_optimizers.lamb(masters, grads, exp_avgs, exp_avg_sqs, counts, **_lamb_options(group))
        if masters is not params:
            for targets, sources in zip(stored, exact[1:], strict=True):
                torch._foreach_copy_(targets, sources)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = self.state[param]
        if not entry:
            entry["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                entry[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return entry


def _lamb_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group of `FusedLAMB` says, by the names of `torch_optimizers.lamb`."""
    return {
        **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
        **{name: group[name] for name in ("bias_correction", "grad_averaging")},
        "decoupled": group["adam_w_mode"],
        "adapt_always": group["use_nvlamb"],
    }


def _scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, factor.to(tensors[0].device, tensors[0].dtype)))


def _refuse_negative(numbers: dict[str, float]) -> None:
    for name, number in numbers.items():
        if not number >= 0.0:
            raise ValueError(
                f"{name} must be at least 0; got {number!r}; call "
                f"FusedLAMB(..., {name}={_DEFAULTS[name]})."
            )
