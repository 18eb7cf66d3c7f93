"""Whether one setting is faster than another: the times of interleaved runs, and a test of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: A gain counts where chance alone would show one as clear in fewer cases than this.
CHANCE = 0.05
#: Rounds of runs: as many first, and as many in all where these do not decide.
ROUNDS = (3, 5)
#: Less is no gain that would be worth a rule.
LEAST_GAIN = 1.02


@dataclass(frozen=True)
class Race:
    """The times of two settings, in seconds a step, run in turns.

    Attributes:
        first, second: one time for each round.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def gain(self) -> float:
        """How many times as fast the second is, by the medians."""
        return median(self.first) / median(self.second)

    @property
    def chance(self) -> float:
        """See `chance_of`."""
        return chance_of(self.second, self.first)

    @property
    def is_gain(self) -> bool:
        """Whether the second is faster beyond noise."""
        return self.gain >= LEAST_GAIN and self.chance <= CHANCE

    def words(self) -> str:
        """Return the figures in words."""
        return (
            f"{self.gain:.2f} x as fast: {1e3 * median(self.first):.3g} -> "
            f"{1e3 * median(self.second):.3g} ms a step, medians of {len(self.first)} runs each in "
            f"turns, p = {self.chance:.2g}"
        )


def race(first: Callable[[], float], second: Callable[[], float]) -> Race:
    """Run two settings in turns until the test decides, or the rounds are over.

    Args:
        first, second: run one of them, and return the seconds of a step.
    """
    times: list[tuple[float, float]] = []
    for rounds in ROUNDS:
        while len(times) < rounds:
            times.append((first(), second()))
        result = Race(*(tuple(column) for column in zip(*times, strict=True)))
        if result.is_gain or result.gain < LEAST_GAIN:
            break
    return result


def chance_of(lower: Sequence[float], higher: Sequence[float]) -> float:
    """Return how often chance alone would put the first times as far below the second.

    The exact one-sided test of Mann and Whitney: of all ways to deal the times out, the share with
    as many pairs in which the first is the smaller (an equal pair counts half). It asks nothing
    about how times are distributed. For three runs each, all of one below all of the other's, it
    is 1 in 20.
    """
    times = [*lower, *higher]
    observed = _pairs_below(lower, higher)
    places = range(len(times))
    dealt = [set(chosen) for chosen in combinations(places, len(lower))]
    as_far = sum(
        _pairs_below(
            [times[i] for i in places if i in one], [times[i] for i in places if i not in one]
        )
        >= observed
        for one in dealt
    )
    return as_far / len(dealt)


def _pairs_below(lower: Sequence[float], higher: Sequence[float]) -> float:
    return sum(
        1.0 if one < other else 0.5 if one == other else 0.0 for one in lower for other in higher
    )


def seconds_per_step(moments: Sequence[float]) -> float | None:
    """Return the mean time of a step, from the moments at which steps ended.

    The first fifth, and never fewer than two steps, warm up. Of the rest the slowest tenth, in
    which the script did something else as well (it saved, it evaluated), is left out.

    Returns:
        None where fewer than two steps are left.
    """
    first = max(2, len(moments) // 5)
    times = sorted(b - a for a, b in zip(moments[first:], moments[first + 1 :], strict=False))
    kept = times[: len(times) - len(times) // 10]
    return sum(kept) / len(kept) if len(times) >= 2 else None
