"""apex.amp.scale_loss: amp_patch's, and what scripts of apex expect around it."""

from __future__ import annotations

import contextlib
from collections.abc import ValuesView
from typing import Any, NoReturn

from torch import Tensor, nn

from amp_patch import amp
from amp_patch.arguments import loss_of
from amp_patch.casting.torch_compile import never_trace
from amp_patch.gradients.foreign_gradients import Watch
from amp_patch.levels import HALVES
from amp_patch.session import session
from amp_patch.step.others_backwards import OthersBackwards
from amp_patch.step.scaled_loss import ScaledLoss

from ._amp_state import _amp_state
from ._process_optimizer import tell_of_own_methods
from .scaler import LossScaler, view_of

__all__ = ["scale_loss"]


@never_trace
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[Tensor]:
    """Scale a loss for its backward; on exit unscale and check the gradients it wrote.

    Arguments and errors are those of `amp_patch.amp.scale_loss`, but for the optimizers. These may
    be the ``values()`` of a dict. With an empty list of them the loss is scaled, for the gradient
    of an input, and no scale moves.
    """
    if isinstance(optimizers, ValuesView):
        optimizers = list(optimizers)
    if _is_switched_off(optimizers):
        return contextlib.nullcontext(loss)
    if session.initialized and isinstance(optimizers, (list, tuple)) and not optimizers:
        return _LossWithoutOptimizer(loss_of(loss), loss_id)
    block = amp.scale_loss(loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check)
    if not isinstance(block, ScaledLoss) or delay_unscale:
        return block
    tell_of_own_methods(optimizers)
    steps = session.lookup.steps_of(optimizers, "with amp.scale_loss(loss, optimizer)") or []
    scaler = session.scalers[session.optimizers.scalers.index_of(steps[0], loss_id)]
    return _FollowedLoss(block, view_of(scaler), delay_overflow_check)


def _is_switched_off(optimizers: Any) -> bool:
    """Return whether a script has set properties that say so, and no `initialize` knows these."""
    properties = vars(_amp_state).get("opt_properties")
    if getattr(properties, "enabled", True):
        return False
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    prepared = session.optimizers.steps
    return not any(one in prepared for one in session.optimizers.originals_of(given))


class _FollowedLoss(contextlib.AbstractContextManager[Tensor]):
    """A block of amp_patch, of which the script's view of the scaler hears at the end.

    Args:
        block: unscales the gradients.
        scaler: of the loss.
        is_open: whether the check is left to the script.
    """

    def __init__(self, block: ScaledLoss, scaler: LossScaler, is_open: bool) -> None:
        self._block, self._scaler, self._is_open = block, scaler, is_open

    @never_trace
    def __enter__(self) -> Tensor:
        return self._block.__enter__()

    @never_trace
    def __exit__(self, exc_type: type[BaseException] | None, *error: Any) -> None:
        self._block.__exit__(exc_type, *error)
        if exc_type is None:
            self._scaler.end_pass(self._is_open)

    def __getattr__(self, name: str) -> NoReturn:
        getattr(self._block, name)  # which says what to write instead
        raise AttributeError(name)


class _LossWithoutOptimizer(contextlib.AbstractContextManager[Tensor]):
    """Yields ``loss * scale`` in fp32; no scale moves, and no optimizer takes the gradients.

    Args:
        loss: a tensor of any shape.
        loss_id: whose scale it is.
    """

    def __init__(self, loss: Tensor, loss_id: int) -> None:
        self._loss = loss
        self._scaler = session.scalers[session.optimizers.scalers.check(loss_id)]
        self._others = session.optimizers.others(())
        self._watches: list[tuple[OthersBackwards, Watch]] = []

    @never_trace
    def __enter__(self) -> Tensor:
        session.cache.begin_backward()
        self._scale = scale = self._scaler.loss_scale()
        if scale == 1.0:
            for one in self._others:
                one.expect_foreign()
        else:
            self._watches = [(one, one.watch_foreign(scale)) for one in self._others]
        loss = self._loss.float() if self._loss.dtype in HALVES else self._loss
        return loss * scale

    @never_trace
    def __exit__(self, *_: Any) -> None:
        session.cache.mark_stale()
        # A step refuses what is left of them: nobody has divided them by the scale.
        for one, watch in self._watches:
            one.note_foreign(watch, (), self._scale)
