"""Holds the numbers of a loss scaler on a device, and updates them there while the host goes on.

They change as those of `scaling.loss_scaler.LossScaler` do. Knows no kernels: `update`, made of
operations of torch, is the reference for update_scale.cu.
"""

from __future__ import annotations

import struct
from typing import Protocol

import torch
from torch import Tensor


class Rule(Protocol):
    """The numbers by which a scale moves; `scaling.scale_rule.ScaleRule` has them."""

    @property
    def dynamic(self) -> bool:
        """False where the scale stays and only passes are counted."""

    @property
    def growth_factor(self) -> float:
        """Multiplies the scale when it grows."""

    @property
    def backoff_factor(self) -> float:
        """Multiplies the scale when it backs off."""

    @property
    def growth_interval(self) -> int:
        """Finite passes in a row until it grows."""

    @property
    def hysteresis(self) -> int:
        """Overflows until it backs off, that one included."""

    @property
    def min_loss_scale(self) -> float:
        """The floor."""

    @property
    def max_loss_scale(self) -> float:
        """The cap."""


class ScaleNumbers(Protocol):
    """The numbers that change; `scaling.loss_scaler.LossScaler` has them and explains each."""

    scale: float
    unskipped: int
    hysteresis_left: int
    skipped: bool
    reduced: bool
    overflows_at_floor: int


#: As in update_scale.cu: scale, the one before, skipped, reduced, and three counts.
_LAYOUT = "=ffii3q"


class ScalerState:
    """The numbers of a loss scaler that change, in 40 bytes on a device; kernels write to them.

    Args:
        scaler: the state to start from.
        device: where it is held.

    Attributes:
        buffer: uint8, shape (40,), the layout of update_scale.cu; the others are views of it, of
            shape (1,).
        scale: float32, the factor of the next loss.
        scale_before: float32, the scale that the last update judged.
        skipped: int32, 1 where the last update told to skip the step, else 0.
        reduced: int32, 1 where it lowered the scale, else 0.
        unskipped: int64, as `LossScaler.unskipped`.
        hysteresis_left: int64, as `LossScaler.hysteresis_left`.
        overflows_at_floor: int64, as `LossScaler.overflows_at_floor`.
    """

    def __init__(self, scaler: ScaleNumbers, device: torch.device) -> None:
        self.buffer = torch.empty(struct.calcsize(_LAYOUT), dtype=torch.uint8, device=device)
        floats = self.buffer[:8].view(torch.float32)
        ints = self.buffer[8:16].view(torch.int32)
        longs = self.buffer[16:].view(torch.int64)
        self.scale, self.scale_before = floats[:1], floats[1:]
        self.skipped, self.reduced = ints[:1], ints[1:]
        self.unskipped, self.hysteresis_left, self.overflows_at_floor = longs.split(1)
        self.write(scaler)

    def write(self, scaler: ScaleNumbers) -> None:
        """Take the state of a scaler."""
        counts = (scaler.unskipped, scaler.hysteresis_left, scaler.overflows_at_floor)
        flags = (scaler.skipped, scaler.reduced)
        packed = struct.pack(_LAYOUT, scaler.scale, scaler.scale, *flags, *counts)
        self.buffer.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))

    @staticmethod
    def read(buffer: Tensor, scaler: ScaleNumbers) -> float:
        """Give a scaler the state that a copy of `buffer` on the CPU holds.

        Returns:
            The scale that the last update judged.
        """
        numbers = struct.unpack(_LAYOUT, bytes(buffer.tolist()))
        scaler.scale, before, skipped, reduced, *counts = numbers
        scaler.skipped, scaler.reduced = bool(skipped), bool(reduced)
        scaler.unskipped, scaler.hysteresis_left, scaler.overflows_at_floor = counts
        return float(before)


@torch.no_grad()
def update(state: ScalerState, found_inf: Tensor, rule: Rule) -> None:
    """Move the scale after one backward pass, as `LossScaler.update` does, without a sync.

    Args:
        state: written to.
        found_inf: float32, one element, on the state's device; not 0 where a gradient overflowed.
        rule: the rule followed; its numbers are float32's where the scale's bits matter.
    """
    overflow = found_inf.reshape(1) != 0
    state.scale_before.copy_(state.scale)
    state.skipped.copy_(overflow)
    state.unskipped.add_(1).mul_(~overflow)
    at_floor = state.scale <= rule.min_loss_scale
    if rule.dynamic:
        state.overflows_at_floor.add_(1).mul_(overflow & at_floor)
        _lower(state, overflow, rule)
        _raise(state, overflow, rule)
    state.reduced.copy_(state.scale < state.scale_before)


def _lower(state: ScalerState, overflow: Tensor, rule: Rule) -> None:
    tolerated = overflow & (state.hysteresis_left > 1)
    state.hysteresis_left.sub_(tolerated.long())
    backed_off = (state.scale.double() * rule.backoff_factor).float().clamp(min=rule.min_loss_scale)
    # A scale loaded from below the floor is not raised.
    lowered = torch.minimum(state.scale, backed_off)
    state.scale.copy_(torch.where(overflow & ~tolerated, lowered, state.scale))


def _raise(state: ScalerState, overflow: Tensor, rule: Rule) -> None:
    grows = ~overflow & (state.unskipped >= rule.growth_interval)
    state.unskipped.mul_(~grows)
    left = torch.where(grows, rule.hysteresis, state.hysteresis_left)
    state.hysteresis_left.copy_(left)
    grown = (state.scale.double() * rule.growth_factor).float().clamp(max=rule.max_loss_scale)
    # A scale loaded from above the cap is not lowered.
    raised = torch.maximum(state.scale, grown)
    state.scale.copy_(torch.where(grows, raised, state.scale))
