"""Whether an optimizer's next step is skipped, why, and whether its last one was.

Nothing else knows. Two can ask for a skip: the host, which has seen an overflow and says so in
words; and a device, in a flag that the host has not read, which some optimizers take
(`optimizers.device_flag`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from amp_patch.kernels import HostCopy
from amp_patch.kernels.graph_capture import captures
from amp_patch.scaling.loss_scaler import LossScaler

from .history import StepCount


class Pending(Protocol):
    """A check of gradients whose result nobody has asked for yet."""

    def settle(self) -> None:
        """Move the loss scale by it, and ask for a skip after an overflow."""

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave it to the caller, if it moves this scaler; return whether it overflowed."""

    def has_found(self, scaler: LossScaler) -> bool:
        """Return whether it overflowed, and moves this scaler."""

    def flags(self) -> list[Tensor]:
        """Return flags, float32 and not 0 where it overflowed; none where that has no effect."""


class Outcome:
    """Whether something is so, which a device may have yet to tell.

    Attributes:
        value: whether it is; of a device a copy of its flag, not 0 where it is, until `known` was
            asked.
    """

    __slots__ = ("value",)

    def __init__(self, value: bool | HostCopy) -> None:
        self.value = value

    def known(self) -> bool:
        """Return whether it is so; waits for a device that has yet to tell."""
        if isinstance(self.value, HostCopy):
            self.value = bool(self.value.wait().item())
        return self.value


_NO, _YES = Outcome(False), Outcome(True)


class Announcement:
    """The line about one step of an optimizer, if that is skipped.

    There is one line for a step, as in apex, however many of its losses overflowed: that of the
    first one's scaler, as it stands after that scaler's last overflow. Outcomes of a device may
    come after the step, and those of several scalers in any order.

    Args:
        announce: gets the line, when the step is over and all outcomes have come; nothing where
            all were finite.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._overflows: list[tuple[str, LossScaler | None] | None] = []
        self._waiting = 0
        self._is_over = False

    def expect(self) -> int:
        """Return the number of an outcome that is to come."""
        self._waiting += 1
        self._overflows.append(None)
        return len(self._overflows) - 1

    def tell(self, number: int, scaler: LossScaler | None, reason: str | None) -> None:
        """Take an outcome in.

        Args:
            number: as `expect` returned it.
            scaler: whose outcome it is; None: of no scaler.
            reason: the line, after an overflow; else None.
        """
        self._waiting -= 1
        self._overflows[number] = None if reason is None else (reason, scaler)
        self._say_when_complete()

    def end(self) -> None:
        """The step was made or skipped."""
        self._is_over = True
        self._say_when_complete()

    def _say_when_complete(self) -> None:
        found = [one for one in self._overflows if one is not None]
        if found and self._is_over and not self._waiting:
            first = found[0][1]
            self._announce([reason for reason, scaler in found if scaler is first][-1])


class Skip:
    """The skipped steps of one optimizer.

    Args:
        announce: gets the message of each step that was skipped.

    Attributes:
        is_certain: True where the host knows a reason to skip the next step.
        flag: fp32, 0-dim, not 0 where a device found a reason; None where no device was asked.
        pending: checks that may yet ask for a skip, the earliest first.
        cleared: whether gradients that overflowed were cleared since the last step, of which the
            script may hold copies.
        left: whether those of the last step, which was skipped, may still be there, for the next
            backward to add to.
        outcome: whether the last step was skipped.
        count: the steps so far, and how many of them were skipped.
        reason: why the last step was skipped, where the host knew a reason before it; else "".
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self.reason = self._next_reason = ""
        self._announcement: Announcement | None = None
        self.is_certain = False
        self.flag: Tensor | None = None
        self.pending: list[Pending] = []
        self.cleared = _NO
        self._cleared_flag: Tensor | None = None
        self.left = _NO
        self._may_be_left = False  # until the first pass since the step, or a clear
        self.count = StepCount()
        self.outcome = _NO

    @property
    def is_possible(self) -> bool:
        """True where the next step will or may be skipped."""
        return self.is_certain or self.flag is not None

    def ask(self, reason: str, scaler: LossScaler | None = None) -> None:
        """Skip the next step, and say why when it comes.

        Args:
            reason: said if it is the first, see `Announcement`.
            scaler: whose overflow it is.
        """
        if not self.is_certain:
            self._next_reason = reason
        self.is_certain = True
        self.expect(scaler)(reason)

    def ask_where(self, found_inf: Tensor) -> None:
        """Skip the next step where a flag (fp32, one element) or an earlier one is not 0.

        Whoever made the flag says why, see `expect`.
        """
        self.flag = either(self.flag, found_inf)

    def expect(self, scaler: LossScaler | None) -> Callable[[str | None], None]:
        """Return what is to be told of an outcome for the next step: why, or None to make it."""
        if self._announcement is None:
            self._announcement = Announcement(self._announce)
        number = self._announcement.expect()
        return functools.partial(self._announcement.tell, number, scaler)

    def settle(self) -> None:
        """Finish the checks that are pending."""
        while self.pending:
            self.pending[0].settle()

    def found(self) -> bool:
        """Return whether the next step is to be skipped. Waits for the device."""
        return self.is_certain or (self.flag is not None and captures.wait_for(self.flag))

    def found_inf(self, device: torch.device) -> Tensor:
        """Return whether the next step is to be skipped: float32, 0-dim, not 0 then.

        Nobody waits for a device, or settles what is pending.

        Args:
            device: where the answer is wanted.
        """
        flags = [flag for check in self.pending for flag in check.flags()]
        known = torch.full((), float(self.is_certain), dtype=torch.float32, device=device)
        return functools.reduce(either, flags if self.flag is None else [*flags, self.flag], known)

    def forget(self) -> None:
        """The next step has other gradients."""
        self.is_certain, self._next_reason = False, ""
        self.flag = self._announcement = None

    def forget_cleared(self) -> None:
        """The script has cleared the gradients of the next step, and may give copies back."""
        if self.is_certain:
            self.cleared = _YES
        elif self.flag is not None and not captures.are_made(self.flag.device):
            self._cleared_flag = either(self._cleared_flag, self.flag)
            if self.cleared.value is not True:
                self.cleared = Outcome(HostCopy(self._cleared_flag))
        self.left, self._may_be_left = _NO, False
        self.forget()

    def note_cleared(self) -> None:
        """The script has cleared all gradients: none of the last step is left."""
        self.left, self._may_be_left = _NO, False

    def note_pass(self, are_left: bool) -> None:
        """A pass begins.

        Args:
            are_left: whether gradients are there. In the first pass since a step they are those of
                the step, unless they were cleared, maybe by zeros in their place.
        """
        if self._may_be_left and are_left:
            self.left = self.outcome
        self._may_be_left = False

    def has_overflowed(self) -> bool:
        """Return whether gradients overflowed since the last step; may wait for their device."""
        can_tell = self.flag is None or not captures.are_made(self.flag.device)
        return self.cleared.known() or (can_tell and self.found())

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped. May wait for its device."""
        return self.outcome.known()

    def note_made(self, flag: Tensor | None) -> None:
        """The step was made; where it was given a flag, that says later if it changed anything."""
        self.outcome, self.reason = _NO, ""
        if flag is None:
            self.count.steps += 1
        else:
            captures.follow(flag.device, functools.partial(self._end_made, flag))
        self._end()

    def note_skipped(self) -> None:
        """The step was skipped; say why, when that is known."""
        self.outcome, self.reason = _YES, self._next_reason
        self.count.add_skipped()
        self._end_announcement()
        self._end()
        self.left = _YES

    def _end(self) -> None:
        self.forget()
        self.cleared = self.left = _NO
        self._may_be_left = True
        self._cleared_flag = None

    def _end_made(self, flag: Tensor) -> None:
        skipped = HostCopy(flag)
        self.outcome = Outcome(skipped)
        self.count.add_late(skipped)
        self._end_announcement()

    def _end_announcement(self) -> None:
        announcement, self._announcement = self._announcement, None
        if announcement is not None:
            announcement.end()


def either(earlier: Tensor | None, flag: Tensor) -> Tensor:
    """Return a flag, 0-dim, not 0 where one of two of one element is not; on the earlier's device.

    Args:
        earlier: one of them; None: there is none.
        flag: the other.
    """
    flag = flag.reshape(())
    if earlier is None:
        return flag
    return torch.maximum(earlier, flag.to(earlier.device, non_blocking=True))
