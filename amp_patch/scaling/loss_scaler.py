"""The loss scale, moved by its rule; knows no gradient, optimizer, model or device."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .scale_rule import (
    COUNT_WORDS,
    SCALE_WORDS,
    ScaleRule,
    is_scale,
    is_whole_from_0,
    is_whole_from_1,
    to_float32,
)

logger = logging.getLogger(__name__)


class OnDevice(Protocol):
    """What moves a scale on a device, in the place of a scaler."""

    def poll(self) -> None:
        """Bring the scaler up to date as far as that needs no waiting."""

    def settle(self) -> None:
        """Wait for all that was asked for, and bring the scaler up to date."""


class Override(Protocol):
    """What may move a scale in the rule's place: methods that a script put on its scaler."""

    @property
    def is_on(self) -> bool:
        """Whether there are such methods now."""

    def move(self, overflow: bool) -> bool:
        """Move the scale after one backward pass; return whether its step must be skipped."""


class Numbers(NamedTuple):
    """All of a `LossScaler` that moves: see its attributes."""

    scale: float
    unskipped: int
    hysteresis_left: int
    skipped: bool
    reduced: bool
    overflows_at_floor: int


@dataclass(eq=False)
class LossScaler:
    """The scale of one loss, moved once per backward pass by `update`.

    The rule::

        on overflow:                                   # any gradient is inf or NaN
            unskipped = 0                              # and the step is skipped
            if hysteresis_left > 1:
                hysteresis_left -= 1                   # tolerated: the scale is held
            else:
                scale = max(min_loss_scale, scale * backoff_factor)
        otherwise:
            unskipped += 1
            if unskipped >= growth_interval:
                scale = min(max_loss_scale, scale * growth_factor)
                unskipped = 0
                hysteresis_left = hysteresis
        a static scale only counts: unskipped = 0 on overflow, unskipped += 1 otherwise

    Growth and back-off are apex.amp's. The hysteresis is that of Megatron-LM's DynamicGradScaler
    (megatron/core/optimizer/grad_scaler.py): once it is used up every overflow backs off, until a
    growth restores it. apex's update_scale_hysteresis kernel differs: there, a single finite pass
    restores it. A scale loaded from beyond the floor or the cap is kept, and moves back only in
    the direction of the event: no overflow ever raises it, and no growth lowers it. Products are
    rounded to float32, as torch's `_amp_update_scale_` stores them.

    Attributes:
        rule: the rule followed.
        scale: the factor by which the loss is multiplied; never 0.
        unskipped: finite backward passes since the last overflow, growth, or start.
        hysteresis_left: overflows up to and including the next one that backs off; >= 1.
        skipped: whether the last update told to skip the step.
        reduced: whether the last update lowered the scale.
        overflows_at_floor: overflows in a row that met a dynamic scale already at the floor.
        device_scaler: moves the scale on a device in the scaler's place; the methods wait for what
            it has not told the scaler yet.
        override: asked by `move`; None where nobody moves the scale but the rule.
        is_by_hand: True once a script is seen to scale and unscale by it itself.
    """

    rule: ScaleRule
    scale: float = field(init=False)
    unskipped: int = field(init=False, default=0)
    hysteresis_left: int = field(init=False)
    skipped: bool = field(init=False, default=False)
    reduced: bool = field(init=False, default=False)
    overflows_at_floor: int = field(init=False, default=0)
    device_scaler: OnDevice | None = field(init=False, default=None, repr=False)
    override: Override | None = field(init=False, default=None, repr=False)
    is_by_hand: bool = field(init=False, default=False, repr=False)

    def __post_init__(self) -> None:
        self.scale = float(self.rule.init_scale)
        self.hysteresis_left = self.rule.hysteresis

    @property
    def is_one(self) -> bool:
        """Whether the scale is 1 for good: no step is skipped, and no gradient looked at."""
        return not self.rule.dynamic and self.scale == 1.0

    def loss_scale(self) -> float:
        """Return the factor by which the next loss is multiplied."""
        if self.device_scaler is not None:
            self.device_scaler.settle()
        return self.scale

    def is_lost(self) -> bool:
        """Return whether a training that diverged drove the scale to where others stand still.

        Below 1 it makes the gradients smaller than they are: in float16 they become 0.
        """
        self.settle()
        return self.rule.dynamic and (self.scale < 1.0 or self.exhausted)

    def settle(self) -> None:
        """Wait for what happens on a device; the attributes are right then."""
        if self.device_scaler is not None:
            self.device_scaler.settle()

    def numbers(self) -> Numbers:
        """Return all that moves."""
        return Numbers(
            self.scale,
            self.unskipped,
            self.hysteresis_left,
            self.skipped,
            self.reduced,
            self.overflows_at_floor,
        )

    def set_numbers(self, numbers: Numbers) -> None:
        """Set what `numbers` returned."""
        self.scale, self.unskipped, self.hysteresis_left = numbers[:3]
        self.skipped, self.reduced, self.overflows_at_floor = numbers[3:]

    @property
    def exhausted(self) -> bool:
        """Whether two overflows in a row met the floor, so that skipping more steps is vain."""
        return self.overflows_at_floor >= 2

    @property
    def is_overridden(self) -> bool:
        """Whether `move` leaves the scale to the override."""
        return self.override is not None and self.override.is_on

    def move(self, overflow: bool) -> bool:
        """Do `update`, or let the override do it in its own way."""
        if self.override is None or not self.override.is_on:
            return self.update(overflow)
        before = self.loss_scale()
        self.skipped = self.override.move(overflow)
        self.reduced = self.loss_scale() < before
        return self.skipped

    def update(self, overflow: bool) -> bool:
        """Move the scale after one backward pass; return whether its step must be skipped."""
        self.settle()
        before = self.scale
        self.skipped = bool(overflow)
        if self.skipped:
            self._after_overflow()
        else:
            self._after_finite()
        self.reduced = self.scale < before
        return self.skipped

    def skip_message(self, loss_id: int) -> str:
        """Return apex's line about the step just skipped; it says 'keeping' if the scale held."""
        change = "reducing loss scale to" if self.reduced else "keeping loss scale at"
        return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change} {self.scale}"

    def state_dict(self) -> dict[str, float | int]:
        """Return apex's two entries, and 'hysteresis' where the rule's is above 1.

        `skipped`, `reduced` and `overflows_at_floor` tell of the pass just made; a loaded scaler
        starts without them.
        """
        self.settle()
        state: dict[str, float | int] = {"loss_scale": self.scale, "unskipped": self.unskipped}
        if self.rule.hysteresis > 1:
            state["hysteresis"] = self.hysteresis_left
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the scale and the count from an entry of `amp.state_dict()` or a GradScaler's state.

        Numbers may be 0-dim tensors. The rule stays as `amp.initialize` set it: GradScaler's
        factors and interval are not read, and a static scale stays (logged where the saved one
        differs). A dynamic scale is taken even from beyond the floor or the cap. Where 'hysteresis'
        is missing, it starts afresh.

        Raises:
            TypeError: state is not a mapping.
            ValueError: an entry is missing, or is not a number in its range.
        """
        self._restore(_parse_state(state))

    def _after_overflow(self) -> None:
        self.unskipped = 0
        if not self.rule.dynamic:
            return
        floor = self.rule.min_loss_scale
        self.overflows_at_floor = self.overflows_at_floor + 1 if self.scale <= floor else 0
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        lowered = max(floor, to_float32(self.scale * self.rule.backoff_factor))
        self.scale = min(self.scale, lowered)

    def _after_finite(self) -> None:
        self.unskipped += 1
        self.overflows_at_floor = 0
        # Not ==: a count saved under a longer interval would never meet a shorter one.
        if not self.rule.dynamic or self.unskipped < self.rule.growth_interval:
            return
        self.unskipped = 0
        self.hysteresis_left = self.rule.hysteresis
        cap = self.rule.max_loss_scale
        raised = min(cap, to_float32(self.scale * self.rule.growth_factor))
        self.scale = max(self.scale, raised)

    def _restore(self, saved: _SavedState) -> None:
        self.settle()
        if self.rule.dynamic:
            if saved.scale == 1.0 < self.scale:
                logger.warning(
                    "The loss scale is dynamic, and goes on from the saved 1.0, at which small "
                    "gradients are 0 in half. Levels without a loss scale save 1.0: of a "
                    "checkpoint of one leave amp.load_state_dict() out, to begin at %s.",
                    self.scale,
                )
            self.scale = saved.scale
        elif saved.scale != self.scale:
            logger.warning(
                "The loss scale is static and stays %s; the saved %s is not taken. Call "
                "amp.initialize(..., loss_scale='dynamic') to go on from it.",
                self.scale,
                saved.scale,
            )
        self.unskipped = saved.unskipped
        full = self.rule.hysteresis
        self.hysteresis_left = full if saved.hysteresis is None else min(saved.hysteresis, full)
        self.skipped = self.reduced = False
        self.overflows_at_floor = 0


def state_dict(scalers: Sequence[LossScaler]) -> OrderedDict[str, dict[str, float | int]]:
    """Return the scalers' states as apex saves them: 'loss_scaler0', 'loss_scaler1', ..."""
    return OrderedDict(
        (f"loss_scaler{loss_id}", scaler.state_dict()) for loss_id, scaler in enumerate(scalers)
    )


def load_state_dict(
    scalers: Sequence[LossScaler],
    state: Mapping[str, Any],
    announce: Callable[[str], None] = print,
) -> None:
    """Load what `state_dict` or apex saved, or one torch.amp.GradScaler's state into every scaler.

    Entries are matched by position, as apex does. Where there are more or fewer of them than
    scalers, ``announce`` gets apex's warnings, and the rest is left alone. All entries are checked
    before any scaler changes. Of a state without entries a warning is logged.

    Raises:
        RuntimeError: a key is not a loss scaler's.
        TypeError, ValueError: as `LossScaler.load_state_dict`.
    """
    entries = [state] * len(scalers) if _is_grad_scaler_state(state) else _scaler_entries(state)
    saved = [_parse_state(entry) for entry in entries[: len(scalers)]]
    if not entries:
        logger.warning(
            "The state of the loss scalers is empty, as that of a run with enabled=False; no loss "
            "scale was loaded. Call amp.load_state_dict() with what amp.state_dict() returned of "
            "a run with amp, or leave it out."
        )
    if len(entries) != len(scalers):
        announce(
            f"Warning: state_dict contains {len(entries)} entries, "
            f"while {len(scalers)} loss_scalers are used"
        )
    for loss_id in range(len(scalers), len(entries)):
        announce(f"Skipping loss_scaler[{loss_id}], since num_losses was set to {len(scalers)}")
    for scaler, one in zip(scalers, saved, strict=False):
        scaler._restore(one)


class _SavedState(NamedTuple):
    scale: float
    unskipped: int
    hysteresis: int | None


def _is_grad_scaler_state(state: Mapping[str, Any]) -> bool:
    return "scale" in state and "_growth_tracker" in state


def _scaler_entries(state: Mapping[str, Any]) -> list[Any]:
    unexpected = [key for key in state if "loss_scaler" not in str(key)]
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. Keys must "
            "be 'loss_scaler0', 'loss_scaler1', ...; call amp.load_state_dict() with what "
            "amp.state_dict() or GradScaler.state_dict() returned."
        )
    return list(state.values())


def _parse_state(state: Mapping[str, Any]) -> _SavedState:
    rule = (
        "a loss scaler's state must be a dict with 'loss_scale' and 'unskipped', or GradScaler's "
        "with 'scale' and '_growth_tracker'"
    )
    mend = "Call amp.load_state_dict() with what amp.state_dict() returned."
    if not isinstance(state, Mapping):
        raise TypeError(f"{rule}; got an object of type {type(state).__name__}. {mend}")
    names = ("scale", "_growth_tracker") if "scale" in state else ("loss_scale", "unskipped")
    if any(name not in state for name in names):
        raise ValueError(f"{rule}; got the keys {list(state)}. {mend}")
    scale = to_float32(_saved_number(state, names[0], is_scale, SCALE_WORDS))
    unskipped = _saved_number(state, names[1], is_whole_from_0, "a whole number of at least 0")
    left = None
    if "hysteresis" in state:
        left = int(_saved_number(state, "hysteresis", is_whole_from_1, COUNT_WORDS))
    return _SavedState(scale, int(unskipped), left)


def _saved_number(
    state: Mapping[str, Any], name: str, holds: Callable[[Any], bool], words: str
) -> float:
    try:
        number = float(state[name])
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if holds(number):
        return number
    raise ValueError(
        f"a saved {name!r} must be {words}; got {state[name]!r}. "
        "Correct that entry, then call amp.load_state_dict() again."
    )
