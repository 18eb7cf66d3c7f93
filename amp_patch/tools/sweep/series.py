"""What the plots draw: curves of steps, thinned and smoothed; knows no plotting library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .outcomes import Run
from .steps import Step

#: More points than a plot is wide show no more, and make the report large.
MOST_POINTS = 1000
#: The mean is drawn over so large a share of the steps.
SMOOTH = 0.04
#: A loss that falls by more than this is drawn on a logarithmic axis.
FALLS_FAR = 30


@dataclass(frozen=True)
class Curve:
    """Values by step, counted from 1; where one is not finite, the line has a gap (NaN)."""

    steps: Sequence[int]
    values: Sequence[float]


def shown_runs(runs: Sequence[Run]) -> list[Run]:
    """Return a run of each level: the first with steps, finished ones first."""
    found: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: (not run.is_finished, run.round)):
        if run.steps:
            found.setdefault(run.level, run)
    order = list(dict.fromkeys(run.level for run in runs))
    return [found[level] for level in order if level in found]


def losses(run: Run) -> Curve:
    """Return the loss of each step."""
    return _curve(run.steps, [step.loss for step in run.steps])


def scales(run: Run) -> Curve:
    """Return the loss scale of each step."""
    return _curve(run.steps, [step.scale for step in run.steps])


def skips(run: Run) -> Curve:
    """Return the steps that were skipped, at the loss scale that each had."""
    pairs = [(i, step.scale or 1.0) for i, step in enumerate(run.steps, 1) if step.skipped]
    return thinned(Curve([step for step, _ in pairs], [scale for _, scale in pairs]))


def last_finite(run: Run) -> Curve:
    """Return the last finite loss as a curve of one point; of none where no loss was finite."""
    curve = losses(run)
    known = [(i, v) for i, v in zip(curve.steps, curve.values, strict=True) if not math.isnan(v)]
    return Curve([i for i, _ in known[-1:]], [v for _, v in known[-1:]])


def smoothed(curve: Curve) -> Curve:
    """Return running means, over the steps around each."""
    reach = int(len(curve.values) * SMOOTH / 2)
    is_gap = [math.isnan(value) for value in curve.values]
    sums = [0.0, *itertools.accumulate(0.0 if math.isnan(v) else v for v in curve.values)]
    counts = [0, *itertools.accumulate(not gap for gap in is_gap)]
    means = []
    for index, gap in enumerate(is_gap):
        start, end = max(0, index - reach), min(len(is_gap), index + reach + 1)
        count = counts[end] - counts[start]
        means.append(math.nan if gap else (sums[end] - sums[start]) / count)
    return Curve(curve.steps, means)


def difference(curve: Curve, reference: Curve) -> Curve:
    """Return how far the running mean of a curve is from another's, as a share of it.

    Both means are over the same steps, those at which both have a value: that of a run which ended
    early would else be another mean than the reference's, near its end.
    """
    there = dict(zip(reference.steps, reference.values, strict=True))
    pairs = [(i, v, there[i]) for i, v in zip(curve.steps, curve.values, strict=True) if i in there]
    steps = [i for i, _, _ in pairs]
    is_gap = [math.isnan(v + r) for _, v, r in pairs]
    ours, others = (
        smoothed(
            Curve(
                steps, [math.nan if gap else value for gap, value in zip(is_gap, side, strict=True)]
            )
        )
        for side in ([v for _, v, _ in pairs], [r for _, _, r in pairs])
    )
    means = zip(steps, ours.values, others.values, strict=True)
    kept = [(i, (v - r) / abs(r)) for i, v, r in means if r]
    return Curve([i for i, _ in kept], [value for _, value in kept])


def falls_far(curves: Sequence[Curve]) -> bool:
    """Return whether a logarithmic axis shows curves better: they fall by a factor of 30."""
    values = [value for curve in curves for value in curve.values if not math.isnan(value)]
    return bool(values) and 0 < FALLS_FAR * min(values) < max(values)


def decades(curves: Sequence[Curve]) -> float:
    """Return how many powers of ten lie between the values above 0."""
    values = [value for curve in curves for value in curve.values if 0 < value < math.inf]
    return math.log10(max(values) / min(values)) if values else 0.0


def powers_of_two(curves: Sequence[Curve]) -> list[int]:
    """Return at most ten exponents that an axis of these values shows."""
    found = [math.log2(v) for curve in curves for v in curve.values if v > 0]
    if not found:
        return []
    low, high = math.floor(min(found)), math.ceil(max(found))
    return list(range(low, high + 1, 1 + (high - low) // 10))


def thinned(curve: Curve) -> Curve:
    """Return as many points as a plot can show, the last one among them."""
    count = len(curve.steps)
    if count <= MOST_POINTS:
        return curve
    kept = sorted({round(i * (count - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)})
    return Curve([curve.steps[i] for i in kept], [curve.values[i] for i in kept])


def _curve(steps: Sequence[Step], values: Sequence[float | None]) -> Curve:
    numbers = [value if value is not None else math.nan for value in values]
    finite = [value if math.isfinite(value) else math.nan for value in numbers]
    return Curve(list(range(1, len(steps) + 1)), finite)
