"""How a loss scale starts and moves, and within which limits; knows no scale that is moving."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Final, Literal


@dataclass(frozen=True)
class ScaleRule:
    """How a loss scale starts and moves; every scale is a factor without a unit.

    Attributes:
        dynamic: whether the scale moves at all.
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` finite backward passes; > 1.
        backoff_factor: multiplies the scale on overflow; above 0 and below 1.
        growth_interval: finite backward passes in a row after which the scale grows; >= 1.
        hysteresis: overflows since the last growth until the scale backs off, that one included;
            1 or more.
        min_loss_scale: the floor: the rule never lowers the scale below it.
        max_loss_scale: the cap: the rule never raises the scale above it.

    Scales lie between 2**-126 and 2**126, so that they and their inverses are normal float32, and
    are rounded to float32: the floor that a device compares with is the one that the host does.

    Raises:
        ValueError: a value is outside its range, or the floor is above the cap.
    """

    dynamic: bool = True
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_loss_scale: float = 2.0**-24
    max_loss_scale: float = 2.0**24

    def overflows_until(self, scale: float, wanted: float) -> int | None:
        """Return how many overflows in a row bring a scale down to a wanted one, or below it.

        None where the floor is above that.
        """
        if wanted < self.min_loss_scale:
            return None
        count = self.hysteresis - 1
        while scale > wanted:
            scale, count = max(scale * self.backoff_factor, self.min_loss_scale), count + 1
        return count

    def __post_init__(self) -> None:
        for name, (holds, words, example) in _LIMITS.items():
            value = getattr(self, name)
            if not holds(value):
                keyword = "loss_scale" if name == "init_scale" else name
                raise ValueError(
                    f"{keyword} must be {words}; got {value!r}. "
                    f"Call amp.initialize(..., {keyword}={example})."
                )
            # A numpy number would reach the checkpoint, which torch.load() then refuses.
            number = type(example)(value)
            object.__setattr__(self, name, to_float32(number) if holds is is_scale else number)
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(
                "min_loss_scale must not be above max_loss_scale; got "
                f"{self.min_loss_scale!r} and {self.max_loss_scale!r}. Call "
                f"amp.initialize(..., {self._mend_bounds()}."
            )

    def _refuse_outside(self) -> None:
        low, high = self.min_loss_scale, self.max_loss_scale
        if not low <= self.init_scale <= high:
            nearest = low if self.init_scale < low else high
            raise ValueError(
                f"init_scale must lie from min_loss_scale to max_loss_scale, {low!r} to {high!r}; "
                f"got {self.init_scale!r}. Call amp.initialize(..., init_scale={nearest!r}), or "
                "move the bounds."
            )

    def _mend_bounds(self) -> str:
        """Return bounds in words: a default makes way, and two that were given are swapped."""
        low, high = self.min_loss_scale, self.max_loss_scale
        if high == ScaleRule.max_loss_scale:
            return f"min_loss_scale={low!r}, max_loss_scale={low!r}) or with a higher cap"
        if low == ScaleRule.min_loss_scale:
            return f"min_loss_scale={high!r}, max_loss_scale={high!r}) or with a lower floor"
        return f"min_loss_scale={high!r}, max_loss_scale={low!r})"

    @classmethod
    def resolve(
        cls,
        loss_scale: float | Literal["dynamic"],
        *,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        hysteresis: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> ScaleRule:
        """Build the rule from `amp.initialize`'s keywords, of which None means the default.

        A dynamic scale starts at ``init_scale``, or where that is None at 2**16 or the floor or cap
        nearest to it. A static one is `loss_scale` itself; the other keywords are checked there,
        and have no effect.

        Raises:
            ValueError: as the class.
        """
        keywords = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
        }
        given: dict[str, Any] = {name: x for name, x in keywords.items() if x is not None}
        if init_scale is not None and not is_scale(init_scale):
            raise ValueError(
                f"init_scale must be {SCALE_WORDS}; got {init_scale!r}. Call "
                "amp.initialize(..., init_scale=3000.0)."
            )
        rule = cls(**given)
        if init_scale is not None:
            rule._refuse_outside()
        if loss_scale != "dynamic":
            return replace(rule, dynamic=False, init_scale=loss_scale)
        start = max(rule.min_loss_scale, min(rule.max_loss_scale, rule.init_scale))
        return replace(rule, init_scale=start)


def to_float32(value: float) -> float:
    """Round to the nearest float32 number."""
    return ctypes.c_float(value).value


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_scale(value: Any) -> bool:
    """Return whether it can be a loss scale, see `ScaleRule`."""
    return _is_real(value) and 2.0**-126 <= value <= 2.0**126


def _is_growth(value: Any) -> bool:
    return _is_real(value) and 1 < value <= 2.0**126


def _is_backoff(value: Any) -> bool:
    return _is_real(value) and 2.0**-126 <= value < 1


def is_whole_from_0(value: Any) -> bool:
    """Return whether it is a whole number of at least 0, of any type of number but bool."""
    return _is_real(value) and value >= 0 and value % 1 == 0


def is_whole_from_1(value: Any) -> bool:
    """Return whether it is a whole number of at least 1, of any type of number but bool."""
    return is_whole_from_0(value) and value >= 1


SCALE_WORDS: Final = "a number from 2**-126 to 2**126"
COUNT_WORDS: Final = "a whole number of at least 1"
# Each field of a rule that holds a number: its check, the check in words, and a value that passes.
_LIMITS: Final[Mapping[str, tuple[Callable[[Any], bool], str, float]]] = {
    "init_scale": (is_scale, f"'dynamic' or {SCALE_WORDS}", 128.0),
    "growth_factor": (_is_growth, "above 1 and at most 2**126", 2.0),
    "backoff_factor": (_is_backoff, "from 2**-126 to below 1", 0.5),
    "growth_interval": (is_whole_from_1, COUNT_WORDS, 2000),
    "hysteresis": (is_whole_from_1, COUNT_WORDS, 2),
    "min_loss_scale": (is_scale, SCALE_WORDS, 2.0**-24),
    "max_loss_scale": (is_scale, SCALE_WORDS, 2.0**24),
}
