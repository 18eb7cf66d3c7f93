"""What parameters that leave an optimizer take along: gradients as plain PyTorch would have them.

An optimizer keeps what a half parameter cannot hold: at the master what is unscaled, set aside what
came before the pass. Both go into ``param.grad`` here, where the next owner looks. Knows pairs of
parameters and masters; not who holds them then.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.weights.lazy_gradients import LazyGradients
from amp_patch.weights.parameter_lists import clear_grads, have_none, store_grad, stored_grad

from .earlier_gradients import EarlierGradients
from .param_pairs import ParamPairs
from .received_gradients import ReceivedGradients
from .scaled_gradients import ScaledGradients, bring_to
from .used_gradients import UsedGradients


class PartedGradients:
    """Takes parameters out of what one optimizer knows of its gradients.

    Args:
        lazy: see `Gradients`.
        scaled: those that are still multiplied by a loss scale.
        aside: those of earlier passes.
        received: what masters have received since the last step.
        used: half gradients that the step is to use, or has used.
    """

    def __init__(
        self,
        lazy: LazyGradients | None,
        scaled: ScaledGradients,
        aside: EarlierGradients,
        received: ReceivedGradients,
        used: UsedGradients,
    ) -> None:
        self._lazy, self._scaled, self._aside = lazy, scaled, aside
        self._received, self._used = received, used

    @torch.no_grad()
    def let_go(
        self, gone: ParamPairs, rest: Iterable[Tensor], block_scale: Scale | None
    ) -> list[tuple[Tensor, Scale]]:
        """Let parameters that have left have the gradients that they would have in plain PyTorch.

        Args:
            gone: these parameters.
            rest: those that have not left, and those whose masters other ranks step.
            block_scale: of the block that is open; None where none is.

        Returns:
            Those whose gradients are multiplied by a scale, with it.
        """
        if self._lazy is not None:
            self._lazy.materialize()
        scale = block_scale if self._scaled.scale is None else self._scaled.scale
        left: list[tuple[Tensor, Scale]] = []
        if scale is None:
            clear_grads(self._received.changes(gone).cleared.master)
            self._replace_scaled_halves(gone)
        else:
            left = self._let_go_scaled(gone, scale)
            if block_scale is None and have_none(rest):
                self._scaled.forget()  # none of them is any more
                self._aside.give_back()
        # A script clears it at the parameter: what stayed at the master would be stepped.
        clear_grads([master for param, master in gone.halves() if stored_grad(param) is not None])
        return left

    def _let_go_scaled(self, gone: ParamPairs, scale: Scale) -> list[tuple[Tensor, Scale]]:
        """Let go of parameters with scaled gradients, or in a block whose backward may write some.

        Where there is a true one as well, of before, the parameter gets the true sum of the two.

        Returns:
            The other parameters, with the scale.
        """
        aside = self._aside.by_param()
        self._aside.drop(set(map(id, gone.model)))
        left: list[tuple[Tensor, Scale]] = []
        for param, master in zip(*gone, strict=True):
            true = aside.get(id(param)) if param is master else stored_grad(master)
            if true is None:
                left.append((param, scale))
                continue
            if (grad := stored_grad(param)) is not None:
                bring_to(1.0, scale, [grad])
                true = true + grad
            store_grad(param, true.to(param.dtype))
        return left

    def _replace_scaled_halves(self, gone: ParamPairs) -> None:
        """Give half parameters true gradients: a fused step leaves them the backward's, scaled."""
        if self._lazy is None:
            return
        used = set(map(id, self._used.alive()))
        for param, master in gone.halves():
            grad, true = stored_grad(param), stored_grad(master)
            if grad is not None and id(grad) in used:
                store_grad(param, None if true is None else true.to(grad.dtype))
