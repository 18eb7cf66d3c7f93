"""A step with a closure, which evaluates the loss again, perhaps several times.

The closure holds its own ``scale_loss`` blocks. Where one of them overflows, the whole step is
skipped. Knows one optimizer with its masters; not how scales move.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from amp_patch.casting.mode import mode
from amp_patch.distributed.agreement import any_rank
from amp_patch.distributed.process_groups import has_others

from .optimizer_backward import OptimizerBackward


class SkippedInClosure(Exception):
    """Ends a step from inside of its closure, for the step is to be skipped.

    Args:
        loss: what the closure returned, which is what the step returns, skipped or not.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class CheckedClosure:
    """A closure after which the step goes on only if loss and gradients are finite.

    It runs with the casts that are on where it is made: an optimizer's step switches them off.

    Args:
        closure: the user's; returns the loss, or anything.
        backward: of the optimizer that steps.
    """

    def __init__(self, closure: Callable[[], Any], backward: OptimizerBackward) -> None:
        self._closure, self._backward = closure, backward
        self._outside = mode.save()

    def __call__(self) -> Any:
        """Return what the closure returns.

        Raises:
            SkippedInClosure: the step is to be skipped; the reason stands in `Skip`.
        """
        masters = self._backward.masters
        if masters is not None:
            masters.publish()  # what the optimizer has tried so far is what the model computes with
            self._backward.shown.offer_stepped()
        inside = mode.save()
        mode.restore(self._outside)
        try:
            loss = self._closure()
        finally:
            mode.restore(inside)
        if masters is not None:
            masters.reconcile()
        self._require_finite(loss)
        return loss

    def _require_finite(self, loss: Any) -> None:
        skip = self._backward.skip
        skip.settle()
        self._backward.refuse_scaled("optimizer.step(closure)")
        self._backward.look_at_given()
        if skip.found():
            raise SkippedInClosure(loss)
        skip.forget()
        groups = self._backward.ranks.groups
        if has_others() and not groups:
            return  # the gradients that ranks share decide: the loss is of this rank alone
        is_finite = not isinstance(loss, Tensor) or bool(torch.isfinite(loss.detach()).all())
        if any_rank(not is_finite, groups):
            skip.ask(
                "Gradient overflow.  Skipping step, the closure returned a loss that is not finite"
            )
            raise SkippedInClosure(loss)


class StateBeforeStep:
    """Copies of what an optimizer may change before its closure says that the step is skipped.

    Args:
        optimizer: whose state and options are copied.
        stepped: the tensors that it steps.
    """

    def __init__(self, optimizer: Optimizer, stepped: list[Tensor]) -> None:
        self._optimizer, self._stepped = optimizer, list(stepped)
        self._values = [tensor.detach().clone() for tensor in stepped]
        self._state = {param: copy.deepcopy(entry) for param, entry in optimizer.state.items()}
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        for tensor, value in zip(self._stepped, self._values, strict=True):
            tensor.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(options)


def evaluates_first(optimizer: Optimizer) -> bool:
    """Return whether an optimizer changes nothing before the closure's last evaluation.

    torch's and our own evaluate it once, at the start; but LBFGS, along a line.
    """
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "amp_patch."))
    return is_known and not isinstance(optimizer, LBFGS)
