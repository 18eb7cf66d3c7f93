"""The figures of each level, set against those of O0 of the same sweep."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .continued import begun_otherwise, continued
from .outcomes import Run
from .verdicts import DIVERGED, REFERENCE, Verdict, deviations, verdict_of
from .warm_up import timed, warm_up_steps


@dataclass(frozen=True)
class Spread:
    """A value and how far it was seen to vary."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Row:
    """What was found of one level; None is what is not known.

    Attributes:
        level, verdict: which, and what is to be thought of it.
        steps, skipped: over all rounds.
        culprits: names of parameters with inf or NaN in their gradients -> in how many steps.
        seconds: median time of a step; the spread over rounds, or quartiles of one round's steps.
        speed_up: times as fast as O0; the spread over rounds, or by the quartiles of both.
        memory: most bytes that CUDA's allocator gave out, or of living tensors on the CPU.
        memory_ratio: times O0's.
        memory_spread: over rounds; None with one round.
        rss: most bytes of RAM that the process took.
        final_loss: mean of the last tenth of the steps, over the rounds that came to their end.
        deviation: of the final loss from O0's, as a share of it; over rounds.
        loss_scale: at the end of the last round.
        unlike_skips: steps that some ranks skipped and others made.
    """

    level: str
    verdict: Verdict
    steps: int
    skipped: int
    culprits: Mapping[str, int]
    seconds: Spread | None
    speed_up: Spread | None
    memory: int | None
    memory_ratio: float | None
    memory_spread: Spread | None
    rss: int | None
    final_loss: float | None
    deviation: Spread | None
    loss_scale: float | None
    unlike_skips: Sequence[int]

    @property
    def rates(self) -> Spread | None:
        """Steps a second; None where they are not known, or as many as the clock can tell."""
        if self.seconds is None or self.seconds.low <= 0:
            return None
        return Spread(1 / self.seconds.high, 1 / self.seconds.middle, 1 / self.seconds.low)


@dataclass(frozen=True)
class Comparison:
    """All levels of a sweep.

    Attributes:
        rows: in the order of the levels.
        warm_up: how many steps of each run are left out of the times.
        rounds: how many runs each level has.
        on_cuda: whether memory is the CUDA allocator's.
        continued: levels that seem to go on from what an earlier run has saved.
        begun_otherwise: levels whose first loss, before any step, is not O0's.
        timed: level -> steps whose time counts, over the rounds that came to their end.
    """

    rows: Sequence[Row]
    warm_up: int
    rounds: int
    on_cuda: bool
    continued: Sequence[str] = ()
    begun_otherwise: Sequence[str] = ()
    timed: Mapping[str, int] = field(default_factory=dict)

    @property
    def reference(self) -> Row | None:
        """The row of O0; None where it was not swept."""
        return next((row for row in self.rows if row.level == REFERENCE), None)

    @property
    def memory_of(self) -> str:
        """What the memory was counted of, in a few words."""
        return "the CUDA allocator" if self.on_cuda else "living tensors in a step"

    @property
    def diverged(self) -> set[str]:
        """The levels that diverged."""
        return {row.level for row in self.rows if row.verdict.kind == DIVERGED}


def compared(runs: Sequence[Run], tolerance: float) -> Comparison:
    """Set the levels of these runs against O0.

    Args:
        runs: each level has as many.
        tolerance: see `verdicts.verdict_of`.
    """
    levels = {run.level: [one for one in runs if one.level == run.level] for run in runs}
    warm_up = warm_up_steps(run.steps for run in runs)
    references = levels.get(REFERENCE, [])
    rows = [_row(own, references, tolerance, warm_up) for own in levels.values()]
    on_cuda = any(run.about.get("is_cuda") for run in runs)
    rounds = len({run.round for run in runs})
    counts = {
        level: sum(len(timed(run.steps, warm_up)) for run in own if run.is_finished)
        for level, own in levels.items()
    }
    otherwise = begun_otherwise(runs, REFERENCE)
    return Comparison(rows, warm_up, rounds, on_cuda, continued(runs), otherwise, counts)


def _row(runs: list[Run], references: list[Run], tolerance: float, warm_up: int) -> Row:
    steps = [step for run in runs for step in run.steps]
    finished = [run for run in runs if run.is_finished]
    used = finished or [run for run in runs if run.steps]
    losses = [run.final_loss for run in finished if run.final_loss is not None]
    memory, own = _memory(runs), _memory(references)
    each = [one for run in runs if (one := _memory([run])) is not None]
    away = deviations(finished, [run for run in references if run.is_finished])
    culprits = Counter(name for step in steps for name, _ in step.overflows)
    return Row(
        level=runs[0].level,
        verdict=verdict_of(runs, references, tolerance),
        steps=len(steps),
        skipped=sum(step.skipped for step in steps),
        culprits=dict(culprits.most_common()),
        seconds=_seconds(used, warm_up),
        speed_up=_speed_up(used, references, warm_up),
        memory=memory,
        memory_ratio=memory / own if memory and own else None,
        memory_spread=_range(each, statistics.median) if len(runs) > 1 else None,
        rss=max((step.rss or 0 for step in steps), default=0) or None,
        final_loss=_mean(losses) if losses else None,
        deviation=_range(away),
        loss_scale=next((step.scale for step in reversed(steps) if step.scale), None),
        unlike_skips=sorted({number for run in runs for number in run.unlike_skips}),
    )


def _memory(runs: Sequence[Run]) -> int | None:
    steps = [step for run in runs for step in run.steps]
    on_device = max((step.memory or 0 for step in steps), default=0)
    return on_device or max((step.tensors or 0 for step in steps), default=0) or None


def _seconds(runs: Sequence[Run], warm_up: int) -> Spread | None:
    """Return the time of a step: with several rounds their medians, else quartiles."""
    times = [found for run in runs if (found := timed(run.steps, warm_up))]
    if len(times) > 1:
        return _range([statistics.median(one) for one in times], statistics.median)
    return _quartiles(times[0]) if times else None


def _speed_up(runs: Sequence[Run], references: Sequence[Run], warm_up: int) -> Spread | None:
    """Return how many times as fast as O0: of each round, or by the quartiles of the one round."""
    own = {run.round: timed(run.steps, warm_up) for run in runs}
    theirs = {run.round: timed(run.steps, warm_up) for run in references}
    both = [number for number in own if own[number] and theirs.get(number)]
    if not both:
        return None
    medians = [statistics.median(theirs[one]) / statistics.median(own[one]) for one in both]
    if len(both) > 1:
        return _range(medians, statistics.median)
    here, there = _quartiles(own[both[0]]), _quartiles(theirs[both[0]])
    return Spread(there.low / here.high, medians[0], there.high / here.low)


def _quartiles(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # statistics.fmean refuses inf beside -inf


def _range(
    values: Sequence[float], middle: Callable[[Sequence[float]], float] = _mean
) -> Spread | None:
    return Spread(min(values), middle(values), max(values)) if values else None
