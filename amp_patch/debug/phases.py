"""Whether an operator belongs to the forward, to the backward, or to the step.

Knows optimizers, autograd's engine and what amp does for a step; counts nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from amp_patch.patching import Patches
from amp_patch.step.backward_pass import BackwardPass
from amp_patch.step.optimizer_step import OptimizerStep
from amp_patch.weights.master_weights import MasterWeights

from .places import makes_gradients

Phase = Literal["forward", "backward", "step"]
#: What amp does for a step, beside the script's own ``optimizer.step()``.
_OF_AMP: dict[type, Sequence[str]] = {
    BackwardPass: ("begin", "unscale_", "update", "end", "leave_scaled", "abandon"),
    OptimizerStep: ("_run", "_skip"),
    MasterWeights: ("reconcile",),
}


class Phases:
    """Says in which phase the code is that runs.

    Args:
        stepping: called with True when an optimizer begins to step, with False when it has.
    """

    def __init__(self, stepping: Callable[[bool], None]) -> None:
        self._stepping = stepping
        self._in_step = self._in_amp = False

    def of(self, operator: str) -> Phase:
        """Return the phase of an operator that runs now.

        Args:
            operator: its name in ATen, such as "addmm".
        """
        if self._in_step or self._in_amp or operator.startswith("_amp_"):
            return "step"
        return "backward" if makes_gradients() else "forward"

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow steps, and what amp does for them, inside the block."""
        patches = Patches()
        for owner, names in _OF_AMP.items():
            for name in names:
                patches.replace(owner, name, self._told(getattr(owner, name)))
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._set_in_step(True)),
            register_optimizer_step_post_hook(lambda *_: self._set_in_step(False)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            patches.undo()

    def _set_in_step(self, value: bool) -> None:
        self._in_step = value
        self._stepping(value)

    def _told(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of amp's that tells when it runs."""

        @functools.wraps(method)
        def telling(*args: Any, **kwargs: Any) -> Any:
            before, self._in_amp = self._in_amp, True
            try:
                return method(*args, **kwargs)
            finally:
                self._in_amp = before

        return telling
