"""``optimizer.zero_grad()``: the gradients of half parameters are cleared with their masters'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from amp_patch.optimizers.fused_step import FusedStep
from amp_patch.weights.master_weights import MasterWeights
from amp_patch.weights.parameter_lists import clear_grads

from .optimizer_backward import OptimizerBackward
from .own_zero_grad import OwnZeroGrad, Row, clear_halves
from .replaced_methods import ReplacedMethods


class ZeroGrad:
    """Clears the gradients of one optimizer, and of its model.

    Args:
        optimizer: the script's.
        backward: its gradients.
        masters: of half parameters; None for levels without.
        fused: steps in its place; None where it steps itself.
        methods: that stand in the place of the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        backward: OptimizerBackward,
        masters: MasterWeights | None,
        fused: FusedStep | None,
        methods: ReplacedMethods,
    ) -> None:
        self._backward, self._masters = backward, masters
        self._fused, self._methods = fused, methods
        inherits = type(optimizer).zero_grad is Optimizer.zero_grad
        self._is_torchs = inherits and "zero_grad" not in vars(optimizer)

    def clear(
        self,
        optimizer: Optimizer | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Clear all gradients; those of some groups where the optimizer's own method does so.

        Args:
            optimizer: whose groups are cleared; None where the user has dropped it.
            original: its ``zero_grad``, with its arguments.
        """
        backward = self._backward
        backward.cleared.note()
        sets_none = self._is_torchs and (args, kwargs) in SETS_NONE
        if sets_none:
            if self._fused is not None:
                self._fused.lazy.drop()
            pairs = backward.pairs()
            clear_grads(pairs.master)
            if self._masters is not None:
                clear_grads(pairs.model)
        else:
            if self._fused is not None:
                self._fused.lazy.materialize_or_drop()  # written or not, they are cleared
            if not self._clear_otherwise(optimizer, original, *args, **kwargs):
                return
        backward.gradients.clear_elsewhere()
        backward.cleared.forget()
        if sets_none and self._masters is not None:
            backward.gradients.forget_used()
        backward.skip.forget_cleared()  # what overflowed is gone
        if backward.current.is_open and backward.zeroing.is_watched:
            backward.shown.watch_block()

    def _clear_otherwise(
        self,
        optimizer: Optimizer | None,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        """Clear as torch with arguments or an optimizer's own ``zero_grad`` does; half ones, too.

        Returns:
            False where that has left gradients of some groups; it is noted which it has not.
        """
        # A look at the groups lets go of parameters that have left, with what gradients they have.
        # Without masters they have these themselves, unless some wait, scaled, for a block.
        waits = self._masters is not None or self._backward.gradients.scaled.scale is not None
        pairs = self._halves() if waits else []
        own = None
        if optimizer is not None and not self._is_torchs:
            own = OwnZeroGrad(optimizer.param_groups, pairs)
        try:
            with self._methods.in_original():
                original(*args, **kwargs)
        except BaseException:
            if own is not None:
                own.take_back()
            raise
        if own is None:
            clear_halves(pairs, bool(args[0] if args else kwargs.get("set_to_none", True)))
            return True
        cleared = own.follow()
        if cleared is not None:
            self._backward.cleared.note_by_model(cleared)
            self._backward.cleared.follow(cleared)
        return cleared is None

    def _halves(self) -> list[Row]:
        """Return the half parameters that the optimizer holds now, with their masters."""
        masters = self._masters
        if masters is not None and masters.are_given_back:
            return list(masters.pairs)  # a checkpoint has put half ones into the groups
        return self._backward.pairs().halves()  # what has left keeps its gradients


#: Arguments with which torch's methods set None, those of optimizers and of modules.
SETS_NONE: tuple[Any, ...] = (((), {}), ((), {"set_to_none": True}), ((True,), {}))
