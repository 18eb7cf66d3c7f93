"""A row of the whole-step benchmark: a candidate's numbers beside those of the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from benchmarks.rounds import Spread

#: What a row has as a multiple of the baseline's.
RATIOS = ("speed", "peak_bytes", "launches", "final_loss")


class Key(NamedTuple):
    """What a row is of."""

    mode: str
    model: str
    candidate: str

    def __str__(self) -> str:
        return ", ".join(self)


@dataclass(frozen=True)
class Measured:
    """Numbers of a candidate; None where nobody can tell.

    Attributes:
        final_loss: after the row's number of steps; it may be NaN.
    """

    samples_per_second: float
    peak_bytes: int | None
    launches: int | None
    final_loss: float


@dataclass(frozen=True)
class Row:
    """A candidate, and the baseline that took turns with it; or why there are no numbers.

    Attributes:
        optimizer: with its options.
        steps: made until the loss.
        speed: how many times as fast as the baseline, in each round.
    """

    key: Key
    date: str
    error: str | None = None
    optimizer: str = ""
    steps: int = 0
    own: Measured | None = None
    baseline: Measured | None = None
    speed: Spread | None = None

    def ratio(self, name: str) -> float | None:
        """Return one of `RATIOS`, where there is a finite one."""
        if name == "speed":
            return None if self.speed is None else self.speed.median
        own, baseline = getattr(self.own, name, None), getattr(self.baseline, name, None)
        if own is None or not baseline:
            return None
        found: float = own / baseline
        return found if math.isfinite(found) else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written; JSON has no NaN, so such a loss is null."""
        fields = _without_nan(asdict(self))
        del fields["key"]
        ratios = {name: self.ratio(name) for name in RATIOS} if self.own else None
        return {**self.key._asdict(), **fields, "ratios": ratios}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Row:
        """Return the row that was written."""
        fields = dict(written)
        del fields["ratios"]
        key = Key(*(fields.pop(name) for name in Key._fields))
        for name in ("own", "baseline"):
            fields[name] = fields[name] and Measured(**_with_nan(fields[name]))
        speed = fields.pop("speed")
        return cls(key, speed=speed and Spread(**speed), **fields)


def _without_nan(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _with_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    loss = numbers["final_loss"]
    return {**numbers, "final_loss": math.nan if loss is None else loss}
