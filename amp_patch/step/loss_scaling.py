"""Who multiplies the loss of a pass, and moves the scale by what was found: one object for each.

`NoScaling` where the scale is 1 for good, `HostScaling` where the host looks at the gradients'
flags, `DeviceScaling` where a device does and the host does not wait. Knows scalers, and whom to
ask for a skip; no optimizer, model or session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from amp_patch.common.scales import Scale
from amp_patch.common.warn_once import warn_once
from amp_patch.kernels import GradCheck
from amp_patch.kernels.graph_capture import captures, type_of
from amp_patch.scaling.device_scaler import DeviceScaler
from amp_patch.scaling.loss_scaler import LossScaler
from amp_patch.scaling.scale_rule import ScaleRule

from .late_check import LateCheck
from .skip import Skip

#: Device types that work behind the host, which must not wait for them.
RUNS_AHEAD = {"cuda"}


#: A dynamic scale below is looked at: large gradients need it, or a training that diverged left it.
_LOW = 2.0**-10

#: What the check of one optimizer's gradients found: the flags, and the parameters that got a
#: gradient, in the check's order.
Found: TypeAlias = tuple[GradCheck, list[Tensor]]

#: Returns the name of a parameter.
NameOf: TypeAlias = Callable[[Tensor], str]

#: Gets the number of a loss scaler, what was found in the pass that overflowed, its scale, and
#: which step it was for, from 1, as the first of its optimizers counts.
OnOverflow = Callable[[int, Sequence[Found], float, int], None]


def nonfinite(found: Sequence[Found]) -> list[tuple[Tensor, str]]:
    """Return the parameters whose gradients were not finite, each with "inf", "NaN" or both.

    Those that an outcome which came late knows no more are left out. May wait for a device.
    """
    return [
        (params[index], kind)
        for check, params in found
        for index, kind in check.nonfinite()
        if index < len(params)
    ]


def names_of(found: Sequence[Found], name_of: NameOf, most: int) -> str:
    """Return the names of the first of these, ``"fc.weight (inf) and 2 more"``; "" of none."""
    rows = nonfinite(found)
    names = ", ".join(f"{name_of(param)} ({kind})" for param, kind in rows[:most])
    return names + (f" and {len(rows) - most} more" if len(rows) > most else "")


class LossScaling(Protocol):
    """The scale of one backward pass.

    Attributes:
        is_on: False where the scale is 1 and an overflow has no consequence.
    """

    is_on: bool

    def scale(self) -> Scale:
        """Return the factor of the loss: a number, or 0-dim fp32 on its device."""

    def update(self, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        """Move the scale after the pass; after an overflow ask for a skip.

        Raises:
            FloatingPointError: the second overflow in a row with the scale at its floor.
        """

    def moves(self, scaler: LossScaler) -> bool:
        """Return whether this is the scaler that `update` moves."""


class NoScaling:
    """A static scale of 1: passes are counted, for scripts step their schedulers by that."""

    is_on = False

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self._scaler, self._device = scaler, device

    def scale(self) -> float:
        """See `LossScaling`."""
        return 1.0

    def update(self, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        """See `LossScaling`."""
        if not captures.are_made(self._device):
            self._scaler.update(overflow=False)
        elif captures.can_follow(self._device):
            captures.follow(self._device, functools.partial(self._scaler.update, overflow=False))

    def moves(self, scaler: LossScaler) -> bool:
        """See `LossScaling`."""
        return scaler is self._scaler


class HostScaling:
    """A scale that the host moves, when it has waited for the flags. One object for many passes.

    Args:
        scaler: moved.
        scaler_id: its number in messages.
        names: returns what names parameters, for messages.
        on_overflow: called after each overflow, see `OnOverflow`.
        tells: returns whether the line about a skipped step is read, and names gradients.
    """

    is_on = True

    def __init__(
        self,
        scaler: LossScaler,
        scaler_id: int,
        names: Callable[[], NameOf],
        on_overflow: OnOverflow,
        tells: Callable[[], bool] = lambda: False,
    ) -> None:
        self.scaler, self.scaler_id = scaler, scaler_id
        self._names, self._tells = names, tells
        self.on_overflow = on_overflow

    def scale(self) -> float:
        """See `LossScaling`."""
        return self.scaler.loss_scale()

    def update(self, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        """See `LossScaling`; after any other error the scale is what it was."""
        scaler = self.scaler
        if scaler.device_scaler is not None:
            scaler.settle()
        before, is_exhausted = scaler.numbers(), False
        overflow = False
        for check, _ in found:
            overflow |= check.overflow
        try:
            if scaler.move(overflow):
                reason = self.reason(found)
                for skip in skips:
                    skip.ask(reason, scaler)
                self.on_overflow(self.scaler_id, found, before.scale, skips[0].count.steps + 1)
                is_exhausted = scaler.exhausted
            elif _is_low(scaler):
                _look_for_need(found, before.scale)
        except BaseException:
            scaler.set_numbers(before)
            raise
        if is_exhausted:
            raise FloatingPointError(self._describe(found))

    def moves(self, scaler: LossScaler) -> bool:
        """See `LossScaling`."""
        return scaler is self.scaler

    def reason(self, found: Sequence[Found]) -> str:
        """Return apex's line about the skipped step, and the first gradients that caused it."""
        names = names_of(found, self._names(), most=3) if self._tells() else ""
        line = self.scaler.skip_message(self.scaler_id)
        return f"{line}; not finite: {names}" if names else line

    def _describe(self, found: Sequence[Found]) -> str:
        shown = names_of(found, self._names(), most=10)
        is_own = self.scaler.rule.min_loss_scale > ScaleRule.min_loss_scale
        smaller = "leave min_loss_scale out, for a smaller scale may do, or " if is_own else ""
        return (
            "gradients must become finite at some loss scale; got two steps in a row that are not, "
            f"with loss scaler {self.scaler_id} at its floor {self.scaler.loss_scale()}: "
            f"{shown}. Run amp-patch diagnose -- SCRIPT, which names the module and operator that "
            f"make them so, or {smaller}call amp.initialize(..., opt_level='O0') to train in fp32."
        )


class DeviceScaling:
    """A scale that the loss's device moves, and by whose flag it skips the step.

    Args:
        device_scaler: the scale there.
        on_host: has the scaler on the host, which hears of it later, and takes over where gradients
            are on other devices as well.
    """

    is_on = True

    def __init__(self, device_scaler: DeviceScaler, on_host: HostScaling) -> None:
        self._device_scaler, self._on_host = device_scaler, on_host
        self._scaler = on_host.scaler

    def scale(self) -> Tensor:
        """See `LossScaling`."""
        return self._device_scaler.scale()

    def update(self, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        """See `LossScaling`; does not wait."""
        flags = [flag for check, _ in found for flag in check.found_inf]
        if not flags or any(flag.device != self._device_scaler.device for flag in flags):
            self._on_host.update(found, skips)
            return
        found_inf = flags[0] if len(flags) == 1 else torch.stack(flags).amax(0)
        for skip in skips:
            skip.ask_where(found_inf)
        # Last, for what the device has done cannot be taken back.
        late = [] if captures.are_made(flags[0].device) else [LateCheck(*one) for one in found]
        self._device_scaler.update(found_inf, functools.partial(self._expect, skips, late))

    def moves(self, scaler: LossScaler) -> bool:
        """See `LossScaling`."""
        return scaler is self._scaler

    def _expect(self, skips: Sequence[Skip], late: Sequence[LateCheck]) -> Callable[[float], None]:
        """The device is at work; return what is to be called when the scaler has heard of it."""
        tell = [skip.expect(self._scaler) for skip in skips]
        return functools.partial(self._report, tell, late, skips[0].count.steps + 1)

    def _report(
        self,
        tell: Sequence[Callable[[str | None], None]],
        late: Sequence[LateCheck],
        step: int,
        scale: float,
    ) -> None:
        was_skipped = self._scaler.skipped
        found = [(check, check.params()) for check in late] if was_skipped else []
        reason = self._on_host.reason(found) if was_skipped else None
        for one in tell:
            one(reason)
        if was_skipped:
            self._on_host.on_overflow(self._on_host.scaler_id, found, scale, step)


def choose_scaling(
    on_host: HostScaling,
    device: torch.device,
    may_be_delayed: bool,
    can_skip: Callable[[], bool],
) -> LossScaling:
    """Return who scales a loss on ``device``.

    The host has to where an optimizer cannot skip its step by itself, and where the scaler has an
    override. Where the check is delayed, for somebody may take it over (`PendingCheck.take_over`).
    Where the scale has met its floor: the error that may follow names gradients, which are
    gone one step later. And where it is so low that the host looks at the gradients' size.

    Args:
        on_host: of the loss's scaler.
        device: the loss's.
        may_be_delayed: whether the check waits for the step (``delay_overflow_check``).
        can_skip: returns whether all optimizers of the loss can skip a step by a flag.
    """
    scaler = on_host.scaler
    # A static scale does not move: to read it, nothing is waited for.
    if scaler.is_one:
        return NoScaling(scaler, device)
    if type_of(device) not in RUNS_AHEAD or may_be_delayed or scaler.is_overridden:
        return on_host
    if scaler.device_scaler is not None:
        scaler.device_scaler.poll()
    if scaler.overflows_at_floor or not can_skip():
        return on_host
    if _is_low(scaler) and not captures.are_made(device):
        return on_host
    return DeviceScaling(DeviceScaler.of(scaler, device), on_host)


def _is_low(scaler: LossScaler) -> bool:
    return scaler.scale < _LOW and scaler.rule.dynamic


def _look_for_need(found: Sequence[Found], scale: float) -> None:
    """Warn, once, of finite gradients that a low scale makes needlessly small.

    Those that need it come near to the largest number of float16, 65504, when they are multiplied.
    """
    norms = [float(check.norm()) for check, _ in found if check.grads]
    if norms and max(norms) * scale < 1.0:
        warn_once(
            "a dynamic loss scale must be one at which float16 gradients do not become 0; got one "
            "below 1/1024, which steps that overflowed have left, for gradients whose norm times "
            "the scale is below 1. Where they overflowed at every scale, inf or NaN came before: "
            "amp.initialize(..., trace_overflow=True) names the module. After a write of earlier "
            "weights call amp.load_state_dict(saved) with what amp.state_dict() returned before, "
            "or bring the weights back by model.load_state_dict(), which does it."
        )


class PendingCheck:
    """What a pass found, until the scale is moved by it: by the pass's `update`, or by the step.

    Args:
        scaling: moves the scale.
        found: for each optimizer that got gradients.
        skips: of all optimizers that the pass was for.
    """

    def __init__(self, scaling: LossScaling, found: Sequence[Found], skips: Sequence[Skip]) -> None:
        self._scaling, self._found, self._skips = scaling, found, skips

    def register(self) -> None:
        """Let whoever makes the next step wait for it."""
        for skip in self._skips:
            skip.pending.append(self)

    def settle(self) -> None:
        """Move the scale, and ask for skips after an overflow; once.

        Raises:
            FloatingPointError: see `LossScaling.update`.
        """
        if self.withdraw():
            self._scaling.update(self._found, self._skips)

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave the check to the caller, if it is for ``scaler``.

        Returns:
            Whether it found an overflow; False of another scaler's.
        """
        is_its = self._scaling.moves(scaler) and self.withdraw()
        return is_its and self.has_found(scaler)

    def has_found(self, scaler: LossScaler) -> bool:
        """Return whether it found an overflow; False of another scaler's."""
        return self._scaling.moves(scaler) and any(check.overflow for check, _ in self._found)

    def flags(self) -> list[Tensor]:
        """Return flags, float32 and not 0 where it overflowed; none at a scale of 1 for good."""
        return [flag for check, _ in self._found for flag in check.found_inf if self._scaling.is_on]

    def withdraw(self) -> bool:
        """Let nobody wait for it any more; return whether somebody did."""
        was_waiting = False
        for skip in self._skips:
            if self in skip.pending:  # an interrupt may have come between two of them
                skip.pending.remove(self)
                was_waiting = True
        return was_waiting
