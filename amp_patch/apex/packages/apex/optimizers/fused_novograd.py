"""NovoGrad as apex had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import amp_C
import torch
from torch import Tensor

from ..multi_tensor_apply import multi_tensor_applier
from .multi_tensor_optimizer import (
    MultiTensorOptimizer,
    evaluated,
    gradients_of,
    refuse_amsgrad,
)

__all__ = ["FusedNovoGrad"]

#: The place in the list of each dtype's norms; all others have the second.
_PLACES = {torch.float16: 0, torch.bfloat16: 2}


class FusedNovoGrad(MultiTensorOptimizer):
    """NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286).

    The state of a parameter is ``exp_avg``. The group counts in ``step`` and holds the averages
    of the gradients' norms (not squared) in ``exp_avg_sq``: a list of one tensor for float16
    parameters, one for float32, one for bfloat16, each with a number for every parameter of the
    group that ever had a gradient, in the group's order.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide averages by ``1 - beta1 ** step``, norms by
            ``sqrt(1 - beta2 ** step)``.
        betas: of the averages of the gradient and of the square of its norm.
        eps: added to the norm.
        weight_decay: the share of the parameter that is added.
        amsgrad: only False.
        reg_inside_moment: average the divided gradient plus decay, not the gradient.
        grad_averaging: let the gradient enter its average by ``1 - beta1``, not by 1.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: norms begin as 0, not as those of the first gradients.
        set_grad_none: whether `zero_grad` sets gradients to None, unless it is told.

    Raises:
        RuntimeError: amsgrad; another norm_type.
    """

    moment_mode = 1
    kept = ("set_grad_none", "moment_mode")
    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError(
                f"norm_type must be 2, or 0 for the largest magnitude; got {norm_type!r}; call "
                "FusedNovoGrad(..., norm_type=2)."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)
        self.moment_mode = 0 if reg_inside_moment else 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state; the norms go where the parameters are."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if "exp_avg_sq" in group and group["params"]:
                device = group["params"][0].device
                norms = [norm if norm is None else norm.to(device) for norm in group["exp_avg_sq"]]
                group["exp_avg_sq"] = norms

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients.

        Args:
            closure: evaluates the loss again, and is evaluated once.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient; norms that were loaded for other parameters.
        """
        loss = evaluated(closure)
        for group in self.param_groups:
            params = self._with_gradients(group)
            step = self._count_step(group) if group["params"] else 0
            for place in (0, 1, 2):
                part = [param for param in params if _place_of(param) == place]
                if part:
                    self._step_part(group, part, place, step)
        return loss

    def _step_part(
        self, group: dict[str, Any], params: list[Tensor], place: int, step: int
    ) -> None:
        norms = self._norms(group, params, place)
        lists = [gradients_of(params), params, *self._state_of(params, "exp_avg")]
        owners = self._owners(group, place)
        if len(owners) == len(params):
            self._apply(group, lists, norms, step)
            return
        rows = {param: row for row, param in enumerate(owners)}
        places = [rows[param] for param in params]
        chosen = torch.tensor(places, device=norms.device, dtype=torch.int64)
        part = norms[chosen]
        self._apply(group, lists, part, step)
        norms[chosen] = part

    def _apply(
        self, group: dict[str, Any], lists: list[list[Tensor]], norms: Tensor, step: int
    ) -> None:
        beta1, beta2 = group["betas"]
        multi_tensor_applier(
            self.multi_tensor_novograd,
            self._dummy_overflow_buf,
            lists,
            norms,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            step,
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
            1 if group["grad_averaging"] else 0,
            self.moment_mode,
            group["norm_type"],
        )

    def _owners(self, group: dict[str, Any], place: int) -> list[Tensor]:
        """Return the parameters that have a norm, in its order."""
        ours = [param for param in group["params"] if _place_of(param) == place]
        return [param for param in ours if "exp_avg" in self.state.get(param, {})]

    def _norms(self, group: dict[str, Any], params: list[Tensor], place: int) -> Tensor:
        """Return the norms of all that have one, the parameters included that are to get one."""
        owners = self._owners(group, place)
        norms = _known_norms(group, place, len(owners))
        known = set(owners)
        new = [param for param in params if param not in known]
        if new:
            first = _norms_of(gradients_of(new), group["norm_type"])
            first = torch.zeros_like(first) if group["init_zero"] else first
            of = dict(zip(owners, norms.to(first.device).unbind(), strict=True))
            of.update(zip(new, first.unbind(), strict=True))
            norms = torch.stack([of[param] for param in group["params"] if param in of])
        group["exp_avg_sq"][place] = norms
        return norms


def _place_of(param: Tensor) -> int:
    return _PLACES.get(param.dtype, 1)


def _known_norms(group: dict[str, Any], place: int, count: int) -> Tensor:
    """Return a group's norms for the dtypes of one place, also where they lie in another's.

    Raises:
        RuntimeError: there are not as many as there are parameters.
    """
    missing = max(2, place + 1) - len(group.setdefault("exp_avg_sq", []))
    group["exp_avg_sq"] += [None] * missing
    none = torch.zeros(0, device="cpu", dtype=torch.float32)
    norms = [none.clone() if norm is None else norm for norm in group["exp_avg_sq"]]
    group["exp_avg_sq"] = norms
    lengths = [norm.numel() for norm in norms]
    if lengths[place] == 0 and sum(lengths) == count == max(lengths):
        # The parameters were cast to another dtype.
        other = lengths.index(count)
        norms[place], norms[other] = norms[other], norms[place]
    elif lengths[place] != count:
        raise RuntimeError(
            f"NovoGrad keeps one norm for each of the {count} parameters that it stepped; got "
            f"{lengths[place]}; call load_state_dict() with the state of an optimizer whose "
            "groups are the same."
        )
    return norms[place]


def _norms_of(grads: list[Tensor], norm_type: int) -> Tensor:
    if norm_type == 2:
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
        each: Tensor = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], True)[1]
        return each
    device = grads[0].device
    largest = [grad.abs().max() if grad.numel() else grad.new_zeros(()) for grad in grads]
    return torch.stack([norm.to(device, torch.float32) for norm in largest])
