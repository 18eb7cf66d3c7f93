"""Whether the first gradients of an optimizer come of a scaled loss; a warning says if not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_patch.common.warn_once import warn
from amp_patch.weights.parameter_lists import stored_grad

from .optimizer_backward import OptimizerBackward


class FirstScale:
    """Looks at one optimizer, of a level with a loss scale, until it is to step with gradients.

    Args:
        backward: of the optimizer.
        was_scaled: returns whether a scaled loss has reached its parameters.
    """

    def __init__(
        self, backward: OptimizerBackward, was_scaled: Callable[[OptimizerBackward], bool]
    ) -> None:
        self._backward, self._was_scaled = backward, was_scaled
        self._is_known = False
        # What comes later may bring gradients of before, or of another optimizer's loss.
        self._ids = frozenset(map(id, backward.pairs().model))

    def look(self) -> bool:
        """Look before a step; return whether all is known, and nobody need look again.

        It warns where the gradients come from a backward that was not of a scaled loss.
        """
        if not self._is_known:
            self._is_known = self._was_scaled(self._backward)
            params = () if self._is_known else self._backward.pairs().model
            if any(stored_grad(one) is not None for one in params if id(one) in self._ids):
                self._is_known = True
                warn(
                    "at a level with a loss scale every loss is to be multiplied by it, or small "
                    "gradients become 0 in float16; got an optimizer.step() with gradients of a "
                    "loss that was not. Write `with amp.scale_loss(loss, optimizer) as "
                    "scaled_loss: scaled_loss.backward()` in the place of loss.backward(), or call "
                    "amp.initialize(..., loss_scale=1.0) to train without."
                )
        return self._is_known

    def looking(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that looks at the first gradients which it brings."""

        def look() -> Any:
            loss = closure()
            self.look()  # an optimizer may call it several times
            return loss

        return closure if self._is_known else look
