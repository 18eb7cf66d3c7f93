"""One backward pass of a scaled loss; knows optimizers and the scaler it is given, no session."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .captures import captures
from .cast_mode import HALVES
from .device_scaler import DeviceScaler
from .kernels import GradCheck
from .loss_scaler import LossScaler
from .optimizer_step import OptimizerStep
from .reception import Held
from .weight_cache import WeightCache

#: Device types that work behind the host, which must not wait for them.
RUNS_AHEAD = {"cuda"}
#: How many of an optimizer's first blocks are watched for a backward that goes astray.
_WATCHED_BLOCKS = 16


def _report(scaler: LossScaler, scaler_id: int, steps: Sequence[OptimizerStep]) -> None:
    """Say which steps were skipped, when it is known."""
    if scaler.skipped:
        for step in steps:
            step.announce(scaler.skip_message(scaler_id))


class _Backward:
    """The backward of a scaled loss: runs inside the block. Holds no graph, for one holds it."""

    def __init__(self) -> None:
        self.has_run = self.is_over = False

    def __call__(self, grads: tuple[Tensor, ...]) -> None:
        self.has_run = True
        if self.is_over:
            raise RuntimeError(
                "scaled_loss.backward() must run inside of its scale_loss() block, whose end "
                "unscales the gradients; got one behind it. Indent it below `with "
                "amp.scale_loss(loss, optimizer) as scaled_loss:`."
            )


class ScaledLoss(contextlib.AbstractContextManager[Tensor]):
    """One backward pass: the order of a training step, from the loss to the unscaled gradients.

    Args:
        loss: a tensor of any shape; yielded in fp32 (float64 stays) times the scale.
        steps: the optimizers whose gradients the backward writes.
        others: all others that there are.
        scaler: whose scale is used, and moved by what the check finds.
        scaler_id: its number in messages.
        cache: made stale when the backward is done.
        name_of: the name of a parameter, for the error at the floor.
        delay_unscale: leave the gradients scaled for the next backward to add to.
        delay_overflow_check: do not wait for the check; it is settled before the next step.
    """

    def __init__(
        self,
        loss: Tensor,
        steps: Sequence[OptimizerStep],
        others: Sequence[OptimizerStep],
        scaler: LossScaler,
        scaler_id: int,
        cache: WeightCache,
        name_of: Callable[[Tensor], str],
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss = loss
        self._steps = steps
        self._others = others
        self._scaler = scaler
        self._scaler_id = scaler_id
        self._cache = cache
        self._name_of = name_of
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._checks: list[tuple[GradCheck, list[Tensor]]] = []

    def __enter__(self) -> Tensor:
        for step in self._steps:
            step.settle()
            step.refuse_nested()
        # A static scale does not move: to read it, nothing is waited for.
        self._checked = self._scaler.rule.dynamic or self._scaler.scale != 1.0
        self._watches = [other.stand_by(self._checked) for other in self._others]
        self._twin = self._twin_to_use()
        scale = self._scaler.loss_scale() if self._twin is None else self._twin.scale()
        self._scale = scale
        self._idle = not self._checked and all(step.takes_grads_as_they_are for step in self._steps)
        # A float64 loss keeps its precision.
        loss = self._loss.float() if self._loss.dtype in HALVES else self._loss
        self._backward = None
        if self._idle:
            return loss
        for step in self._steps:
            step.drop_cleared()
        for step, held in self._share("params"):
            step.begin_backward(held, scale)
        scaled_loss = loss * scale
        self._backward = self._watched_backward(scaled_loss)
        return scaled_loss

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if exc_type is not None or not self._delay_unscale:
            self._cache.mark_stale()
        for other, watch in zip(self._others, self._watches, strict=True):
            other.note_strays(watch, self._steps)
        if self._backward is not None:
            self._backward.is_over = True
        if not self._idle:
            self._finish(is_failed=exc_type is not None)
        elif exc_type is None and captures.can_follow(self._loss.device):
            self._count()

    def _finish(self, is_failed: bool) -> None:
        if is_failed:
            self._abandon()
            return
        if self._backward is not None and not self._backward.has_run:
            self._refuse_another()
        if self._delay_unscale:
            for step in self._steps:
                step.delay_unscale(self._scale)
        else:
            self._unscale()

    def _watched_backward(self, scaled_loss: Tensor) -> _Backward | None:
        """Return what notes the backward of the scaled loss, None where nothing depends on it."""
        blocks = self._steps[0].blocks = self._steps[0].blocks + 1
        # With a scale of 1 any backward will do. And a script that goes astray does so at once:
        # to look at every block would cost the host more than the scaling.
        if not self._checked or scaled_loss.grad_fn is None or blocks > _WATCHED_BLOCKS:
            return None
        backward = _Backward()
        scaled_loss.grad_fn.register_prehook(backward)
        return backward

    def _refuse_another(self) -> None:
        """Raise if gradients came from another backward than the scaled loss's.

        Raises:
            RuntimeError: as said; the gradients are as before the block.
        """
        if any(step.gradients.wrote(held) for step, held in self._share("params")):
            self._abandon()
            raise RuntimeError(
                "the backward() inside a scale_loss() block must be that of the loss it yields; "
                "got gradients of another one, which are not multiplied by the loss scale and "
                "would be divided by it. Call scaled_loss.backward() in `with "
                "amp.scale_loss(loss, optimizer) as scaled_loss:`."
            )

    def _abandon(self) -> None:
        for step, held in self._share("params"):
            step.abandon_backward(held)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            "amp.scale_loss() returns a block, which yields the scaled loss; got a look-up of "
            f"{name!r} on the block; write `with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()`."
        )

    def _share(self, by: Literal["params", "stepped"]) -> list[tuple[OptimizerStep, Held]]:
        """Return what each optimizer handles: of what two of them hold, the first one."""
        if len(self._steps) == 1:
            return [(self._steps[0], self._steps[0].held())]
        taken: set[int] = set()
        return [(step, step.held().share(taken, by)) for step in self._steps]

    def _twin_to_use(self) -> DeviceScaler | None:
        """Return what moves the scale on the loss's device, None where the host has to.

        It has to where an optimizer cannot skip its step by itself. Where the check is delayed,
        which somebody may `take_over`. And where the scale has met its floor: the error that may
        follow names gradients, which are gone one step later.
        """
        device, scaler = self._loss.device, self._scaler
        if not self._checked or device.type not in RUNS_AHEAD or self._delay_overflow_check:
            return None
        if scaler.twin is not None:
            scaler.twin.poll()
        if scaler.overflows_at_floor or not all(step.skips_by_flag for step in self._steps):
            return None
        return DeviceScaler.of(scaler, device)

    def _unscale(self) -> None:
        self._checks = [
            step.end_backward(held, self._scale) for step, held in self._share("stepped")
        ]
        for step in self._steps:
            step.gradients.put_unwritten_back()
        if self._twin is not None and self._move_on_device(self._twin):
            return
        if not self._delay_overflow_check:
            self.settle()
            return
        for step in self._steps:
            step.unsettled.append(self)

    def _move_on_device(self, twin: DeviceScaler) -> bool:
        """Move the scale and have the steps skipped without waiting; False where that cannot be."""
        flags = [flag for check, _ in self._checks for flag in check.found_inf]
        if not flags or any(flag.device != twin.device for flag in flags):
            return False
        found_inf = flags[0] if len(flags) == 1 else torch.stack(flags).amax(0)
        self._checks = []
        # Not a method: it would hold the loss, and with it the graph, until the outcome is there.
        report = functools.partial(_report, self._scaler, self._scaler_id, self._steps)
        twin.update(found_inf, report)
        for step in self._steps:
            step.skip_if(found_inf)
        return True

    def settle(self) -> None:
        """Look at the flags, move the scale, tell the optimizers whether to skip.

        Raises:
            FloatingPointError: the second overflow in a row with the scale at its floor.
        """
        for step in self._steps:
            if self in step.unsettled:
                step.unsettled.remove(self)
        checks, self._checks = self._checks, []
        if not self._checked:
            self._count()
            return
        if self._scaler.update(any(check.overflow for check, _ in checks)):
            for step in self._steps:
                step.have_skipped(self._scaler, self._scaler_id)
        if self._scaler.exhausted:
            raise FloatingPointError(self._describe(checks))

    def _count(self) -> None:
        """Nothing is checked; scripts step their schedulers where a backward pass was counted."""
        count = functools.partial(self._scaler.update, overflow=False)
        captures.follow(self._loss.device, count)

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave a check that was delayed to the caller, if it moves ``scaler``.

        Returns:
            Whether it found an overflow; False of another scaler's.
        """
        if scaler is not self._scaler:
            return False
        for step in self._steps:
            if self in step.unsettled:
                step.unsettled.remove(self)
        checks, self._checks = self._checks, []
        return any(check.overflow for check, _ in checks)

    def _describe(self, checks: Sequence[tuple[GradCheck, list[Tensor]]]) -> str:
        found = [
            f"{self._name_of(params[index])} ({kind})"
            for check, params in checks
            for index, kind in check.nonfinite()
        ]
        shown = ", ".join(found[:10]) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
        return (
            "gradients must become finite at some loss scale; got two steps in a row that are not, "
            f"with loss scaler {self._scaler_id} at its floor {self._scaler.loss_scale()}: "
            f"{shown}. Look for what makes them so at these parameters (a division, a logarithm, "
            "the learning rate), or call amp.initialize(..., opt_level='O0') to train in fp32."
        )
