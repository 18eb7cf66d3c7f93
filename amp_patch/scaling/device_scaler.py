"""A loss scaler that moves on its device, so that no step waits for what a check has found.

Knows one `LossScaler`, which it brings up to date when the outcome has arrived; no optimizer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from amp_patch import kernels
from amp_patch.kernels import HostCopy, ScalerState
from amp_patch.kernels.graph_capture import captures

from .loss_scaler import LossScaler, Numbers

#: Outcomes that may be on their way: the host is not to run further ahead of the device.
_MOST_PENDING = 2


class DeviceScaler:
    """A loss scaler as its device knows it.

    Args:
        scaler: what it says when this is made, or is changed to later, is taken over. Whoever
            reads it waits for the outcomes on their way.
        device: where losses and gradients are.
    """

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self.device = device
        self._scaler = scaler
        self._state = ScalerState(scaler, device)
        self._known: Numbers | None = scaler.numbers()
        self._scale: Tensor | None = None
        self._pending: deque[tuple[HostCopy, Callable[[float], None]]] = deque()

    @classmethod
    def of(cls, scaler: LossScaler, device: torch.device) -> DeviceScaler:
        """Return what moves a scaler on a device, made where there is nothing yet."""
        known = scaler.device_scaler
        if isinstance(known, cls) and known.device == device:
            return known
        if known is not None:
            known.settle()
        made = cls(scaler, device)
        scaler.device_scaler = made
        return made

    def scale(self) -> Tensor:
        """Return the factor of the next loss, 0-dim fp32; the same object until it may move."""
        self._take_over()
        if self._scale is None:
            self._scale = self._state.scale.clone().reshape(())
        return self._scale

    def renew(self) -> None:
        """Take over what the scaler says now, for a CUDA graph; `scale` is another object then."""
        self._take_over()
        self._scale = None

    def _take_over(self) -> None:
        if not self._pending and self._scaler.numbers() != self._known:
            self._known = self._scaler.numbers()
            self._state.write(self._scaler)
            self._scale = None

    def update(self, found_inf: Tensor, expect: Callable[[], Callable[[float], None]]) -> None:
        """Move the scale after one backward pass, without waiting.

        Args:
            found_inf: fp32, shape (1,), on the device; not 0 where a gradient overflowed.
            expect: called when the device has been told, in a CUDA graph at each replay. What it
                returns is called when the scaler has been brought up to date, with the scale that
                the pass had.
        """
        try:
            kernels.update_scale(self._state, found_inf, self._scaler.rule)
            self._scale = None
            state = self._state.buffer
            if captures.are_made(self.device):
                state = state.clone()  # a graph may move the scale again
            captures.follow(self.device, functools.partial(self._expect, state, expect))
        except BaseException:
            # Nobody would tell the host of this update: the device takes over what the host knows.
            self.settle()
            self._known = self._scale = None
            raise

    def poll(self) -> None:
        """Take in the outcomes that have arrived."""
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0][0].ready()):
            self._take_in()

    def settle(self) -> None:
        """Take in all outcomes; waits for those on their way."""
        while self._pending:
            self._take_in()

    def _expect(self, state: Tensor, expect: Callable[[], Callable[[float], None]]) -> None:
        self._scale = None
        self._pending.append((HostCopy(state), expect()))

    def _take_in(self) -> None:
        copy, on_outcome = self._pending.popleft()
        judged = ScalerState.read(copy.wait(), self._scaler)
        self._known = self._scaler.numbers()
        on_outcome(judged)
