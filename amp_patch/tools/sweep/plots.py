"""The plots as PNG files, by matplotlib: loss, speed, memory, loss scale, and all in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from . import series, wording
from .comparison import Comparison, Row, Spread
from .outcomes import Run
from .verdicts import OK, REFERENCE

#: How far the axis of the difference reaches where there is none, and no tolerance.
LEAST_LIMIT = 0.01
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def write(folder: Path, comparison: Comparison, runs: Sequence[Run], tolerance: float) -> None:
    """Write loss.png, speed.png, memory.png, loss_scale.png, and overview.png with all four."""
    shown = series.shown_runs(runs)
    with matplotlib.rc_context(_STYLE):
        _loss_figure(comparison, shown, tolerance).savefig(folder / "loss.png")
        for name, draw in (
            ("speed", lambda axes: draw_speed(axes, comparison)),
            ("memory", lambda axes: draw_memory(axes, comparison)),
            ("loss_scale", lambda axes: draw_scale(axes, shown)),
        ):
            _single(draw).savefig(folder / f"{name}.png")
        _overview(comparison, shown).savefig(folder / "overview.png")


def draw_loss(axes: Axes, comparison: Comparison, runs: Sequence[Run]) -> None:
    """Draw the loss of each step, faint, and its running mean."""
    drawn = [curve for run in runs if (curve := _draw_loss_of(axes, run))]
    _mark_divergence(axes, comparison, runs)
    if series.falls_far(drawn):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("Loss, running mean; single steps are faint")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if drawn:
        axes.legend(ncols=min(len(drawn), 3), handlelength=3)
    else:
        _say(axes, "no loss was recorded")


def draw_difference(axes: Axes, runs: Sequence[Run], tolerance: float) -> None:
    """Draw how far the running mean of each level is from O0's, and the tolerance as a band."""
    losses = {run.level: series.losses(run) for run in runs}
    away = {level: series.difference(one, losses[REFERENCE]) for level, one in losses.items()}
    axes.axhspan(-tolerance, tolerance, color="#eeeeee", zorder=0)
    for level, whole in away.items():
        curve = series.thinned(whole)
        axes.plot(curve.steps, curve.values, **_line(level))
    finite = [abs(value) for curve in away.values() for value in curve.values]
    most = max((value for value in finite if not math.isnan(value)), default=0.0)
    limit = min(max(1.2 * most, 1.6 * tolerance), max(1.0, 4 * tolerance)) or LEAST_LIMIT
    axes.set_ylim(-limit, limit)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_title(f"Difference from {REFERENCE}; the band is the tolerance, {tolerance:.1%}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"vs {REFERENCE}")


def draw_speed(axes: Axes, comparison: Comparison) -> None:
    """Draw a bar a level: steps a second, with their spread."""
    rates = {row.level: row.rates for row in comparison.rows}
    labels = {
        row.level: wording.times(row.speed_up.middle) if row.speed_up else ""
        for row in comparison.rows
    }
    _bars(axes, comparison.rows, rates, labels)
    axes.set_title("Speed: median, and its spread")
    axes.set_xlabel("steps per second")


def draw_memory(axes: Axes, comparison: Comparison) -> None:
    """Draw a bar a level: the most memory that it took."""
    most = max((row.memory for row in comparison.rows if row.memory), default=1)
    unit, name = wording.unit_of(most)
    sizes = {
        row.level: Spread(*[row.memory / unit] * 3) if row.memory else None
        for row in comparison.rows
    }
    labels = {row.level: wording.memory(row) for row in comparison.rows}
    _bars(axes, comparison.rows, sizes, labels)
    axes.set_title(f"Peak memory: {comparison.memory_of}")
    axes.set_xlabel(name)


def draw_scale(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the loss scale of each step; a triangle marks a skipped one."""
    for run in runs:
        curve, skipped = series.thinned(series.scales(run)), series.skips(run)
        axes.plot(curve.steps, curve.values, drawstyle="steps-post", **_line(run.level))
        axes.plot(
            skipped.steps,
            skipped.values,
            linestyle="none",
            marker="v",
            markersize=10,
            zorder=4,
            markeredgecolor="white",
            color=wording.COLORS[run.level],
        )
    axes.set_yscale("log", base=2)
    axes.set_title("Loss scale; triangles are skipped steps")
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if runs:
        axes.legend(ncols=min(len(runs), 3), handlelength=3)


def _loss_figure(comparison: Comparison, runs: Sequence[Run], tolerance: float) -> Figure:
    if not any(run.level == REFERENCE and run.losses for run in runs) or len(runs) < 2:
        return _single(lambda axes: draw_loss(axes, comparison, runs))
    figure = Figure(figsize=(8, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(5, 3), sharex=True)
    draw_loss(upper, comparison, runs)
    upper.set_xlabel("")
    draw_difference(lower, [run for run in runs if run.losses], tolerance)
    return figure


def _single(draw: Callable[[Axes], None]) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure.subplots())
    return figure


def _overview(comparison: Comparison, runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(14, 9), layout="constrained")
    (loss, speed), (scale, memory) = figure.subplots(2, 2)
    draw_loss(loss, comparison, runs)
    draw_speed(speed, comparison)
    draw_scale(scale, runs)
    draw_memory(memory, comparison)
    return figure


def _draw_loss_of(axes: Axes, run: Run) -> series.Curve | None:
    raw = series.losses(run)
    if all(map(math.isnan, raw.values)):
        return None
    mean = series.smoothed(raw)
    raw, mean = series.thinned(raw), series.thinned(mean)
    color = wording.COLORS[run.level]
    axes.plot(raw.steps, raw.values, color=color, alpha=0.18, linewidth=1.0)
    axes.plot(mean.steps, mean.values, **_line(run.level))
    return mean


def _mark_divergence(axes: Axes, comparison: Comparison, runs: Sequence[Run]) -> None:
    """Mark the last finite loss of a level that diverged."""
    diverged = comparison.diverged
    for run in runs:
        last = series.last_finite(run)
        if run.level in diverged:
            axes.plot(
                last.steps,
                last.values,
                linestyle="none",
                marker="X",
                markersize=12,
                color=wording.COLORS[run.level],
                markeredgecolor="white",
                zorder=5,
            )


def _bars(
    axes: Axes,
    rows: Sequence[Row],
    values: dict[str, Spread | None],
    labels: dict[str, str],
) -> None:
    """Draw horizontal bars from the top down, each with its label inside of or after it."""
    most = max((value.high for value in values.values() if value), default=1.0)
    for place, row in enumerate(rows):
        value = values[row.level]
        if value is None:
            axes.text(0.01 * most, place, row.verdict.kind, va="center", color="#666666")
            continue
        error = [[value.middle - value.low], [value.high - value.middle]]
        axes.barh(
            place,
            value.middle,
            color=(wording.COLORS[row.level], wording.BAR_OPACITY),
            height=0.7,
            xerr=error if value.high > value.low else None,
            error_kw={"ecolor": wording.SPREAD_COLOR, "capsize": 4},
        )
        label = labels[row.level]
        if row.verdict.kind != OK:
            label += f"  ({row.verdict.kind})"
        axes.text(value.high + 0.02 * most, place, label, va="center")
    axes.set_yticks(range(len(rows)), [row.level for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.6 * most)
    axes.grid(visible=False, axis="y")


def _line(level: str) -> dict[str, Any]:
    dashes = wording.DASHES[level]
    return {
        "color": wording.COLORS[level],
        "label": level,
        "linestyle": (0, dashes) if dashes else "solid",
    }


def _say(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, color="#666666")
