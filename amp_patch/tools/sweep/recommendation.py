"""Which level to train at, and why, in a sentence or two."""

from __future__ import annotations

from dataclasses import dataclass

from .comparison import Comparison, Row
from .verdicts import NO_LOSS, NOT_COMPARED, OK, REFERENCE

#: A gain below this share is none, however small the spread.
LEAST_GAIN = 0.02
LEAST_SAVING = 0.05
#: Memory is not worth more than this share of the speed, unless one needs it.
MOST_LOSS = 0.1
#: Of fewer steps no level is said to be faster.
LEAST_TIMED = 5
_FEW = (
    f" Fewer than {LEAST_TIMED} steps of {{}} or of {REFERENCE} have a time: too few to say what "
    "is faster. Sweep more --steps."
)
_ONE_ROUND = " One round cannot see whether the machine changed between runs; --repeat 3 can."


@dataclass(frozen=True)
class Recommendation:
    """Which level to train at.

    Attributes:
        level: None where nothing can be recommended.
        reason: whole sentences.
    """

    level: str | None
    reason: str


def recommend(comparison: Comparison) -> Recommendation:
    """Return the fastest level that trains as O0; else the one that saves memory; else O0."""
    reference = comparison.reference
    if reference is None or reference.verdict.kind not in (OK, NO_LOSS):
        return _without_reference(comparison)
    good = [
        row
        for row in comparison.rows
        if row.verdict.kind == reference.verdict.kind and row is not reference
    ]
    unjudged = (
        " No loss was passed to amp.scale_loss: whether it trains as well is for you to judge."
        if reference.verdict.kind == NO_LOSS
        else ""
    )
    few = [row.level for row in good if _least_timed(comparison, row) < LEAST_TIMED]
    faster = [row for row in good if is_faster(row) and row.level not in few]
    after = unjudged + (_FEW.format(" and ".join(few)) if few else "")
    after += _ONE_ROUND if comparison.rounds == 1 else ""
    if faster:
        best = max(faster, key=_speed)
        return Recommendation(best.level, _faster(best, faster) + after)
    smaller = [row for row in good if _saves(row) and _speed(row) >= 1 - MOST_LOSS]
    if smaller:
        best = min(smaller, key=lambda row: row.memory_ratio or 1.0)
        reason = f"No level is faster than {REFERENCE} beyond the spread; {best.level} takes"
        reason += (
            f" {best.memory_ratio:.2f} times its memory, at {_speed(best):.2f} times its speed."
        )
        return Recommendation(best.level, reason + after)
    if len(comparison.rows) == 1:
        return Recommendation(REFERENCE, "No other level was swept.")
    return Recommendation(REFERENCE, _stay(good) + (after if good else unjudged))


def _least_timed(comparison: Comparison, row: Row) -> int:
    """Return how many steps of a level or of O0 have a time, whichever has fewer."""
    return min(comparison.timed[level] for level in (row.level, REFERENCE))


def is_faster(row: Row) -> bool:
    """Return whether a level is faster than O0 beyond the spread."""
    gain = row.speed_up
    return gain is not None and gain.low > 1 and gain.middle > 1 + LEAST_GAIN


def _speed(row: Row) -> float:
    return row.speed_up.middle if row.speed_up else 0.0


def _saves(row: Row) -> bool:
    return row.memory_ratio is not None and row.memory_ratio < 1 - LEAST_SAVING


def _faster(best: Row, faster: list[Row]) -> str:
    loss = f", its final loss {best.deviation.middle:+.1%} from it" if best.deviation else ""
    memory = f", at {best.memory_ratio:.2f} times the memory" if best.memory_ratio else ""
    words = f"{best.level} is {_speed(best):.2f} times as fast as {REFERENCE}{memory}{loss}."
    spread = best.speed_up
    rivals = [
        row
        for row in faster
        if row is not best and spread and row.speed_up and row.speed_up.high >= spread.low
    ]
    if rivals:
        names = " and ".join(row.level for row in rivals)
        words += f" {names} cannot be told from it by speed."
    return words


def _stay(good: list[Row]) -> str:
    if not good:
        return f"No other level that came to its end trains as {REFERENCE} does."
    words = f"No level that trains as {REFERENCE} does is faster beyond the spread"
    small = min(good, key=lambda row: row.memory_ratio or 1.0)
    if not _saves(small):
        return words + ", or saves memory."
    return (
        f"{words}. Where memory is what is missing: {small.level} takes {small.memory_ratio:.2f}"
        f" times as much, at {_speed(small):.2f} times the speed."
    )


def _without_reference(comparison: Comparison) -> Recommendation:
    row = comparison.reference
    why = f"{REFERENCE} was not swept" if row is None else f"{REFERENCE} {_state(row)}"
    alive = [row for row in comparison.rows if row.verdict.kind in (OK, NOT_COMPARED)]
    if not alive:
        return Recommendation(None, f"{why}, and no other level trained: nothing to recommend.")
    timed = [row for row in alive if row.seconds]
    fastest = min(timed, key=lambda row: row.seconds.middle if row.seconds else 0.0, default=None)
    names = ", ".join(row.level for row in alive)
    speed = f"; {fastest.level} is the fastest" if fastest and len(alive) > 1 else ""
    return Recommendation(
        None,
        f"{why}: whether another level trains as well is not known. These trained: {names}{speed}.",
    )


def _state(row: Row) -> str:
    kind = row.verdict.kind
    return {"no steps": "made no steps", "not run": "was not run"}.get(
        kind, kind if kind in ("crashed", "diverged", "timed out") else f"was {kind}"
    )
