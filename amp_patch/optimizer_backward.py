"""What an optimizer does around the backward passes that its losses make, up to its step.

Knows one optimizer, its gradients and masters; nothing of models, levels or how scales move.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from .captures import captures
from .device_skip import DeviceSkip, skips_by_flag
from .fp32_store import FP32Store
from .fused_step import FusedStep
from .gradients import Gradients
from .half_gradients import HalfGradients
from .kernels import GradCheck
from .lazy_gradients import stored_grad
from .loss_scaler import LossScaler
from .master_weights import MasterWeights
from .reception import Held
from .stray_gradients import StrayGradients, Watch


class Unsettled(Protocol):
    """A check of gradients whose result nobody has asked for yet (``delay_overflow_check``)."""

    def settle(self) -> None:
        """Move the loss scale and tell every optimizer concerned whether to skip."""

    def take_over(self, scaler: LossScaler) -> bool:
        """Leave it to the caller, if it moves this scaler; return whether it overflowed."""


class OptimizerBackward:
    """The gradients that one optimizer is to step with, and whether it may.

    Args:
        optimizer: held weakly; its half parameters give way to masters.
        store: where the masters' fp32 values come from; None for levels without masters.
        fused: step by `FusedStep`; with a store only.

    Attributes:
        gradients, masters: what was made for it; masters may be None.
        skip_message: why the next step must be skipped, or None.
        scaling: True inside a ``scale_loss`` of this optimizer.
        blocks: how many of these there were.
        unsettled: checks to settle before the next step.
    """

    def __init__(self, optimizer: Optimizer, store: FP32Store | None, fused: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._fused = FusedStep(optimizer) if fused else None
        lazy = None if self._fused is None else self._fused.lazy
        self.gradients = Gradients(lazy)
        self.masters = None if store is None else MasterWeights(optimizer, store, lazy)
        if self._fused is not None and self.masters is not None:
            self._fused.param_of = self.masters.param_of
        self.skip_message: str | None = None
        self._overflowed: LossScaler | None = None
        self._device_skip = DeviceSkip()
        self._strays = StrayGradients()
        self.scaling = False
        self.blocks = 0
        self.unsettled: list[Unsettled] = []
        self._held = Held([], [])
        self._thread: int | None = None

    def held(self) -> Held:
        """Return what the optimizer holds now."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        if len(groups) == 1:
            stepped = groups[0]["params"]
        else:
            stepped = list(chain.from_iterable(group["params"] for group in groups))
        known = self._held.stepped
        if len(stepped) != len(known) or not all(map(operator.is_, stepped, known)):
            stepped = list(stepped)
            masters = self.masters
            params = stepped if masters is None else [masters.param_of(p) for p in stepped]
            self._held = Held(params, stepped)
        return self._held

    @property
    def takes_grads_as_they_are(self) -> bool:
        """True where a scale of 1 leaves nothing to do: no masters, nothing delayed."""
        return self.masters is None and self.gradients.delayed_scale is None

    @property
    def skips_by_flag(self) -> bool:
        """True where the device can skip the next step, whatever the host knows."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        fused = self._fused
        can_be = skips_by_flag(optimizer) if fused is None else fused.skips_by_flag(optimizer)
        stepped = self.held().stepped
        if stepped and not can_be:
            captures.refuse_waiting(stepped[0].device)
        return can_be

    def have_skipped(self, scaler: LossScaler, scaler_id: int) -> None:
        """Have the next step skipped, and say so of this scaler; as in apex the first is named."""
        if self._overflowed is None or self._overflowed is scaler:
            self._overflowed = scaler
            self.skip_message = scaler.skip_message(scaler_id)

    def skip_if(self, found_inf: Tensor) -> None:
        """Have the device skip the next step where a flag is not 0."""
        self._device_skip.add(found_inf)

    def has_master_of(self, param: Tensor) -> bool:
        """Return whether it steps a master of a half parameter."""
        return self.masters is not None and self.masters.has_master_of(param)

    def drop_cleared(self) -> None:
        """Follow the user who cleared the gradients of the model's parameters."""
        if self.gradients.may_be_cleared:
            self.gradients.drop_cleared(self.held())

    def begin_backward(self, held: Held, scale: float | Tensor) -> None:
        """Make room for the gradients of a loss multiplied by ``scale``."""
        self._strays.drop_cleared()
        self.gradients.set_aside(held, scale)
        self.scaling = True
        self._thread = threading.get_ident()
        may_skip = self.skip_message is not None or self._device_skip.is_open
        if may_skip and self.gradients.are_cleared(self.held()):
            self._forget_skip()  # the user dropped what overflowed

    def delay_unscale(self, scale: float | Tensor) -> None:
        """Leave the gradients scaled, for the next backward to add to."""
        self.gradients.delay(self.held(), scale)
        self._strays.note_own_block()
        self.scaling = False

    def end_backward(self, held: Held, scale: float | Tensor) -> tuple[GradCheck, list[Tensor]]:
        """Receive the gradients, unscaled and checked, and the parameters they are of."""
        try:
            return self.gradients.receive(held, scale)
        finally:
            self._strays.note_own_block()
            self.scaling = False

    def abandon_backward(self, held: Held) -> None:
        """The body of ``scale_loss`` raised: the gradients are as before it."""
        self.scaling = False
        self.gradients.put_back(held)

    def refuse_nested(self) -> None:
        """Raise inside a ``scale_loss`` of the same optimizer.

        Raises:
            RuntimeError: as said.
        """
        if self.scaling:
            raise RuntimeError(
                "scale_loss() blocks of one optimizer must follow each other, for both would "
                "unscale the same gradients; got one inside another. Add the losses and scale "
                "the sum, or leave the first block before the second (delay_unscale=True keeps "
                "its gradients)."
            )

    def stand_by(self, is_scaled: bool) -> Watch:
        """Call before a backward that is not for this optimizer, but may reach its parameters.

        Args:
            is_scaled: whether its gradients are multiplied by a loss scale.

        Returns:
            What `note_strays` needs.
        """
        if self._fused is not None and isinstance(self._fused.lazy.source, HalfGradients):
            self._fused.lazy.materialize()  # unscales half gradients, which may be written to
        waiting = self._fused is not None and self._fused.lazy.are_waiting
        # A half gradient that a master has received is not read again. And another thread trains
        # its own models.
        watched = [
            param
            for param, stepped in zip(*self.held(), strict=True)
            if param is stepped or not (waiting or stored_grad(stepped) is not None)
        ]
        is_here = self._thread in (None, threading.get_ident())
        return self._strays.watch(watched if is_scaled and is_here else [])

    def note_strays(self, watch: Watch, steps: Sequence[OptimizerBackward]) -> None:
        """Call after that backward, which was for the optimizers of ``steps``."""
        if not self.scaling:  # a block of its own, around or in another thread, unscales all
            self._strays.note(watch, {id(param) for step in steps for param in step.held().params})

    def show_masters(self) -> None:
        """The user gets the masters, to read, write and differentiate by until the next step."""
        self.receive_unscaled()
        if self._fused is not None:
            # A backward adds to what is stored; what waits would come last in the sum.
            self._fused.lazy.materialize()
        if self.masters is not None:
            self.masters.expose()

    def clip_waiting(self, max_norm: float, norm_type: float) -> Tensor | None:
        """Clip gradients that the step unscales itself, for it to do that, too.

        Returns:
            The total norm, 0-dim; None where gradients are clipped as all others are.
        """
        optimizer = self._optimizer()
        if self._fused is None or optimizer is None or norm_type != 2.0:
            return None
        return self._fused.clip(optimizer, max_norm)

    def settle(self) -> None:
        """Finish the checks that ``delay_overflow_check`` left open."""
        while self.unsettled:
            self.unsettled.pop(0).settle()

    def refuse_delayed(self, caller: str) -> None:
        """Raise if gradients are still scaled.

        Raises:
            RuntimeError: as said.
        """
        if self.scaling:
            raise RuntimeError(
                f"{caller} needs unscaled gradients, which there are from the end of a "
                "scale_loss() block on; got a call inside the block. Move it behind the block."
            )
        self.drop_cleared()
        self._strays.refuse(caller)
        if self.gradients.delayed_scale is not None:
            raise RuntimeError(
                f"{caller} needs unscaled gradients; the last scale_loss(..., "
                "delay_unscale=True) left them scaled. Leave delay_unscale out in the last "
                "scale_loss() before it, or clear them with optimizer.zero_grad()."
            )
        self.receive_unscaled()

    def receive_unscaled(self) -> None:
        """Let masters have what a backward outside of ``scale_loss`` left at their parameters."""
        expects = self.masters is not None and not self.scaling and not self.gradients.are_pending
        if expects:
            self.gradients.receive_unscaled(self.held())

    def _end_pending(self) -> None:
        """Nobody skips the next step: unscale delayed gradients, drop those that overflowed."""
        with contextlib.suppress(FloatingPointError):  # of no interest, for the scale goes, too
            self.settle()
        overflow = self.skip_message is not None or self._device_skip.found()
        delayed_scale = self.gradients.delayed_scale
        if delayed_scale is not None and self.gradients.are_delayed(self.held()):
            overflow |= self.gradients.receive(self.held(), delayed_scale)[0].overflow
            self.gradients.put_unwritten_back()
        if overflow:
            for tensor in (*self.held().params, *self.held().stepped):
                tensor.grad = None
        self._forget_skip()

    def _forget_skip(self) -> None:
        self.skip_message = self._overflowed = None
        self._device_skip.forget()

    def _drop_waiting(self) -> None:
        if self._fused is not None:
            self._fused.lazy.drop()
