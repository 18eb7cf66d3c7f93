"""What torch's GradScaler notes of each optimizer between two updates, noted of one that is served.

It refuses calls in another order by that, and scripts read there whether a step is skipped. Knows
no loss scaler.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.amp.grad_scaler import OptState


class Served(Protocol):
    """What serves all GradScalers; `ServedScalers` says how."""

    def unscale_(self, optimizer: Any) -> None:
        """Unscale an optimizer's gradients, once."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step it."""

    def update(self, new_scale: Any = None) -> None:
        """Move the scale."""

    def found_inf(self, optimizer: Any) -> Tensor:
        """Return whether its next step is skipped: float32, 0-dim, not 0 where it is."""

    def refuse_closure(self, kwargs: dict[str, Any]) -> None:
        """Raise where a step was given a closure."""


class ScalerStages:
    """Calls what serves a GradScaler in the orders that torch allows, and notes what torch does.

    The notes are the scaler's own, so that each of several has its own. One that was made with
    ``enabled=False`` takes calls in any order, as in torch.

    Args:
        served: makes the calls.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    def unscale_(self, scaler: Any, optimizer: Any) -> None:
        """Unscale, and note what was found.

        Raises:
            RuntimeError: it was unscaled, or stepped, since the last update.
        """
        if not scaler.is_enabled():
            self._served.unscale_(optimizer)
            return
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(); "
                "remove the second call, or call scaler.update() after scaler.step(optimizer)."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(); call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer), and scaler.update() after it."
            )
        self._served.unscale_(optimizer)
        found_inf = self._served.found_inf(optimizer)
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    def step(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, and unscale it before where that was not done.

        Raises:
            RuntimeError: it was stepped since the last update, or is given a closure.
        """
        if not scaler.is_enabled():
            return self._served.step(optimizer, *args, **kwargs)
        self._served.refuse_closure(kwargs)
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(); call scaler.update() "
                "after the steps of all optimizers."
            )
        if state["stage"] is OptState.READY:
            self.unscale_(scaler, optimizer)
        result = self._served.step(optimizer, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, scaler: Any, new_scale: Any = None) -> None:
        """Move the scale, and begin anew."""
        self._served.update(new_scale)
        if scaler.is_enabled():
            scaler._per_optimizer_states.clear()
