"""Adam with the arguments that it had in 2019, in their order, and the formula of then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...optimizers.fused_adam import FusedAdam as CurrentFusedAdam

__all__ = ["FusedAdam"]


class FusedAdam(CurrentFusedAdam):
    """Adam with decay by the formula of `deprecated_adam`; clips the gradients of each group.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the averages by ``1 - beta ** step``.
        betas: of the averages of the gradient and of its square.
        eps: added to the root of the latter.
        eps_inside_sqrt: add eps to the average of squares, not to its root.
        weight_decay: the share of the parameter that is added to the update.
        max_grad_norm: the gradients of each group are clipped to this norm; 0: they are not.
        amsgrad: only False.
        use_mt, amp_scale_adjustment: without effect.

    Raises:
        RuntimeError: amsgrad.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
            eps_inside_sqrt=eps_inside_sqrt,
        )
