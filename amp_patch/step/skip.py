"""Whether an optimizer's next step is skipped, why, and whether its last one was.

Nothing else knows. Two can ask for a skip: the host, which has seen an overflow and says so in
words; and a device, in a flag that the host has not read. torch's fused optimizers and the kernels
of csrc/ take that flag (as `torch.amp.GradScaler` hands it over) and change nothing where it is
not 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from amp_patch.kernels import HostCopy
from amp_patch.kernels.graph_capture import captures
from amp_patch.scaling.loss_scaler import LossScaler


class Pending(Protocol):
    """A check of gradients whose result nobody has asked for yet."""

    def settle(self) -> None:
        """Move the loss scale by it, and ask for a skip after an overflow."""

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave it to the caller, if it moves this scaler; return whether it overflowed."""


class Skip:
    """The skipped steps of one optimizer.

    Args:
        announce: gets the message of each step that was skipped.

    Attributes:
        reason: the host's words for why the next step is to be skipped; None where it has none.
        flag: fp32, 0-dim, not 0 where a device found a reason; None where no device was asked.
        pending: checks that may yet ask for a skip, the earliest first.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.reason: str | None = None
        self._asked_by: LossScaler | None = None
        self.flag: Tensor | None = None
        self.pending: list[Pending] = []
        self._was_skipped: bool | HostCopy = False

    @property
    def is_possible(self) -> bool:
        """True where the next step will or may be skipped."""
        return self.reason is not None or self.flag is not None

    def ask(self, reason: str, scaler: LossScaler | None = None) -> None:
        """Skip the next step, and say why when it comes.

        Args:
            reason: of several scalers' reasons the first scaler's is said, as in apex.
            scaler: whose overflow it is.
        """
        if self.reason is None or scaler is self._asked_by:
            self.reason, self._asked_by = reason, scaler

    def ask_where(self, found_inf: Tensor) -> None:
        """Skip the next step where a flag (fp32, one element) or an earlier one is not 0.

        Whoever made the flag says why, when he hears of it.
        """
        flag, earlier = found_inf.reshape(()), self.flag
        if earlier is not None:
            flag = torch.maximum(earlier, flag.to(earlier.device, non_blocking=True))
        self.flag = flag

    def settle(self) -> None:
        """Finish the checks that are pending."""
        while self.pending:
            self.pending[0].settle()

    def found(self) -> bool:
        """Return whether the next step is to be skipped. Waits for the device."""
        return self.reason is not None or (self.flag is not None and captures.wait_for(self.flag))

    def forget(self) -> None:
        """The next step has other gradients."""
        self.reason = self._asked_by = self.flag = None

    @property
    def outcome(self) -> bool | HostCopy:
        """Whether the last step was skipped; not 0 then, where a device has yet to tell."""
        return self._was_skipped

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was skipped. May wait for its device."""
        if isinstance(self._was_skipped, HostCopy):
            self._was_skipped = bool(self._was_skipped.wait().item())
        return self._was_skipped

    def note_made(self, flag: Tensor | None) -> None:
        """The step was made; where it was given a flag, that says later if it changed anything."""
        self._was_skipped = False
        if flag is not None:
            captures.follow(flag.device, functools.partial(self._expect, flag))
        self.forget()

    def note_skipped(self) -> None:
        """The step was skipped; say why, if nobody else does."""
        self._was_skipped = True
        if self.reason is not None:
            self.announce(self.reason)
        self.forget()

    def _expect(self, flag: Tensor) -> None:
        self._was_skipped = HostCopy(flag)


def skips_by_flag(optimizer: Optimizer) -> bool:
    """Return whether the steps of an optimizer can be skipped by its device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def must_be_told(optimizer: Optimizer) -> bool:
    """Return whether the host has to know if the step that is next is skipped.

    Of a skipped first step torch's fused SGD leaves a momentum that nothing was written to.
    """
    return isinstance(optimizer, SGD) and any(
        param.grad is not None and not _has_momentum(optimizer, param)
        for group in optimizer.param_groups
        for param in (group["params"] if group["momentum"] != 0 else ())
    )


def _has_momentum(optimizer: Optimizer, param: Tensor) -> bool:
    return optimizer.state.get(param, {}).get("momentum_buffer") is not None


def step_by_flag(optimizer: Optimizer, flag: Tensor, step: Callable[[], Any]) -> Any:
    """Return what a step returned that an optimizer of torch makes only where a flag is 0."""
    given: Any = optimizer
    given.grad_scale, given.found_inf = None, flag
    try:
        return step()
    finally:
        del given.grad_scale, given.found_inf
