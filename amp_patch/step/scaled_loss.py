"""The ``with`` block of `amp.scale_loss`: it calls the hooks of a backward pass in their order.

`unscaled_loss` has the block in which nothing is scaled.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import NoReturn

import torch
from torch import Tensor

from amp_patch.casting.torch_compile import never_trace

from .backward_pass import BackwardPass

#: The blocks that are open, by their ids, with the threads that opened them: hooks of a backward on
#: a GPU run in other threads. A block that nobody ended, see `BackwardPass.is_ended_by`, is gone.
#: One in which nothing is scaled is the only one, and all scales are 1.
_open: dict[int, tuple[int, weakref.ref[ScaledLoss]]] = {}


def open_scale() -> float | None:
    """Return what the loss of the innermost open block is multiplied by, of this thread's first.

    None outside of blocks.
    """
    blocks = [(thread, block()) for thread, block in list(_open.values())]
    own = [block for thread, block in blocks if thread == threading.get_ident() and block]
    found = own or [block for _, block in blocks if block]
    return found[-1].scale() if found else None


def with_torchs_backward(loss: Tensor) -> Tensor:
    """Return the loss; a view of it where a script has set ``loss.backward``, to open a block."""
    if not isinstance(loss, Tensor) or "backward" not in vars(loss):
        return loss
    with torch.enable_grad():
        return loss.view_as(loss)


class LossBlock(contextlib.AbstractContextManager[Tensor]):
    """Yields a loss; what is looked up on the block itself is most often meant of that loss."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            "amp.scale_loss() returns a block, which yields the scaled loss; got a look-up of "
            f"{name!r} on the block; write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()`."
        )


class ScaledLoss(LossBlock):
    """Yields a scaled loss; at its end the gradients of that loss's backward are true.

    Args:
        loss: a tensor of any shape.
        backward_pass: not begun.
        delay_unscale: leave the gradients scaled for the next backward to add to.
        delay_overflow_check: do not wait for the check; it is settled before the next step.
    """

    def __init__(
        self,
        loss: Tensor,
        backward_pass: BackwardPass,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss, self._pass = loss, backward_pass
        backward_pass.is_ended_by(self)
        self._delay_unscale, self._delay_overflow_check = delay_unscale, delay_overflow_check

    def scale(self) -> float:
        """Return what the loss is multiplied by."""
        return float(self._pass.factor)

    @never_trace
    def __enter__(self) -> Tensor:
        _open[id(self)] = threading.get_ident(), weakref.ref(self)
        try:
            if torch.is_grad_enabled():
                return self._pass.scale(self._loss)
            if torch.is_inference_mode_enabled():
                raise RuntimeError(
                    "scale_loss() must be entered outside of torch.inference_mode(), for gradients "
                    "that are made there cannot be unscaled outside; got a block inside of it. End "
                    "the inference_mode() before the block, or write torch.no_grad() in its place."
                )
            with torch.enable_grad():  # a backward works without, and so it does here
                return self._pass.scale(self._loss)
        except BaseException:
            _open.pop(id(self), None)
            self._pass.abandon()
            raise

    @never_trace
    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        _open.pop(id(self), None)
        if exc_type is not None:
            self._pass.abandon()
            return
        try:
            if self._delay_unscale:
                self._pass.leave_scaled()
            elif self._delay_overflow_check:
                self._pass.unscale_()
            else:
                self._pass.end()
        except BaseException:
            self._pass.abandon()
            raise
