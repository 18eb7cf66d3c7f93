"""The plots of the report, which can be zoomed and read off, by plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plotly import graph_objects

from . import series, wording
from .comparison import Comparison, Row, Spread
from .outcomes import Run
from .verdicts import OK, REFERENCE

_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 14}
#: Labels of a logarithmic axis that do not lie upon each other.
MOST_DECADES = 8


def figures(
    comparison: Comparison, runs: Sequence[Run], tolerance: float
) -> dict[str, tuple[str, Any]]:
    """Return name -> title and figure, in the order in which they are shown."""
    shown = series.shown_runs(runs)
    with_loss = [run for run in shown if run.losses]
    found = {"loss": ("Loss: running mean; single steps are faint", _loss(comparison, with_loss))}
    if len(with_loss) > 1 and any(run.level == REFERENCE for run in with_loss):
        title = f"Difference of the loss from {REFERENCE}; the band is the tolerance"
        found["difference"] = title, _difference(comparison, with_loss, tolerance)
    found["speed"] = "Speed: median and spread, steps per second", _speed(comparison)
    found["memory"] = f"Peak memory: {comparison.memory_of}", _memory(comparison)
    found["loss_scale"] = "Loss scale; triangles are skipped steps", _scale(shown)
    return found


def _loss(comparison: Comparison, runs: Sequence[Run]) -> Any:
    figure = _figure("step", "loss")
    for run in runs:
        raw = series.losses(run)
        mean, raw = series.thinned(series.smoothed(raw)), series.thinned(raw)
        figure.add_scatter(
            x=raw.steps,
            y=raw.values,
            mode="lines",
            line={"color": wording.COLORS[run.level], "width": 1},
            opacity=0.2,
            legendgroup=run.level,
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(x=mean.steps, y=mean.values, **_line(run.level))
    diverged = comparison.diverged
    for run in runs:  # above all lines
        if run.level in diverged:
            last = series.last_finite(run)
            marker = {"symbol": "x", "size": 12, "color": wording.COLORS[run.level]}
            _add_markers(figure, run.level, last, f"{run.level}, diverged", marker)
    means = [series.smoothed(series.losses(run)) for run in runs]
    is_log = series.falls_far(means)
    # "D2" are ticks at 1, 2 and 5, which lie upon each other where the axis is long
    decades = series.decades(means)
    tick = "D2" if decades < 3 else math.ceil(decades / MOST_DECADES)
    figure.update_yaxes(type="log" if is_log else "linear", dtick=tick if is_log else None)
    figure.update_yaxes(exponentformat="power")
    figure.update_layout(updatemenus=[_log_switch(is_log, tick)])
    return figure


def _difference(comparison: Comparison, runs: Sequence[Run], tolerance: float) -> Any:
    figure = _figure("step", f"vs {REFERENCE}")
    losses = {run.level: series.losses(run) for run in runs}
    figure.add_hrect(y0=-tolerance, y1=tolerance, fillcolor="#eeeeee", line_width=0, layer="below")
    reach = [-2 * tolerance, 2 * tolerance]
    for level, curve in losses.items():
        away = series.thinned(series.difference(curve, losses[REFERENCE]))
        figure.add_scatter(x=away.steps, y=away.values, **_line(level))
        if level not in comparison.diverged:
            reach += [value for value in away.values if math.isfinite(value)]
    figure.update_yaxes(tickformat="+.1%")
    if comparison.diverged:  # beside its millions of per cent all others would be one line
        edge = 0.05 * (max(reach) - min(reach))
        figure.update_yaxes(range=[min(reach) - edge, max(reach) + edge])
    return figure


def _speed(comparison: Comparison) -> Any:
    bars: list[tuple[Row, Spread | None, str]] = []
    for row in comparison.rows:
        if row.rates is None:
            bars.append((row, None, row.verdict.short))
            continue
        text = wording.times(row.speed_up.middle) if row.speed_up else ""
        text += f" ({row.verdict.kind})" if row.verdict.kind != OK else ""
        bars.append((row, row.rates, text.strip()))
    return _bars("steps per second", bars)


def _memory(comparison: Comparison) -> Any:
    unit, name = wording.unit_of(max((row.memory or 1 for row in comparison.rows), default=1))
    bars: list[tuple[Row, Spread | None, str]] = []
    for row in comparison.rows:
        if row.memory is None:
            bars.append((row, None, row.verdict.short))
            continue
        bars.append((row, Spread(*[row.memory / unit] * 3), wording.memory(row)))
    return _bars(name, bars)


def _bars(title: str, bars: Sequence[tuple[Row, Spread | None, str]]) -> Any:
    """Draw a horizontal bar a level, from the top down, and its text beyond its spread."""
    figure = _figure(title, None)
    most = max((value.high for _, value, _ in bars if value), default=1.0)
    for row, value, text in reversed(bars):
        value = value or Spread(0.0, 0.0, 0.0)
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [value.high - value.middle],
            "arrayminus": [value.middle - value.low],
            "color": wording.SPREAD_COLOR,
            "visible": value.high > value.low,
        }
        color = {"color": wording.COLORS[row.level], "opacity": wording.BAR_OPACITY}
        figure.add_bar(
            x=[value.middle],
            y=[row.level],
            error_x=spread,
            marker=color,
            orientation="h",
            name=row.level,
        )
        figure.add_annotation(
            x=value.high, y=row.level, text=text, xanchor="left", xshift=6, showarrow=False
        )
    figure.update_xaxes(range=[0, 1.5 * most])
    return figure


def _scale(runs: Sequence[Run]) -> Any:
    figure = _figure("step", "loss scale")
    for run in runs:
        curve = series.thinned(series.scales(run))
        line = _line(run.level)
        line["line"] = {**line["line"], "shape": "hv"}
        figure.add_scatter(x=curve.steps, y=curve.values, **line)
    for run in runs:  # above all lines
        marker = {"symbol": "triangle-down", "size": 11, "color": wording.COLORS[run.level]}
        _add_markers(figure, run.level, series.skips(run), f"{run.level}, skipped", marker)
    powers = series.powers_of_two([series.scales(run) for run in runs])
    figure.update_yaxes(
        type="log",
        tickvals=[2.0**power for power in powers],
        ticktext=[f"2<sup>{power}</sup>" for power in powers],
    )
    return figure


def _add_markers(
    figure: Any, level: str, curve: series.Curve, name: str, marker: dict[str, Any]
) -> None:
    figure.add_scatter(
        x=curve.steps,
        y=curve.values,
        mode="markers",
        marker=marker,
        name=name,
        legendgroup=level,
        showlegend=False,
    )


def _figure(x: str, y: str | None) -> Any:
    figure = graph_objects.Figure()
    figure.update_layout(
        template="plotly_white",
        font=_FONT,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": x, "automargin": True},
        yaxis={"title": y, "automargin": True},
        height=380,
        bargap=0.3,
        showlegend=y is not None,
    )
    return figure


def _line(level: str) -> dict[str, Any]:
    dash = ",".join(f"{2 * length}px" for length in wording.DASHES[level]) or "solid"
    return {
        "mode": "lines",
        "name": level,
        "legendgroup": level,
        "line": {"color": wording.COLORS[level], "dash": dash, "width": 2.5},
    }


def _log_switch(is_log: bool, tick: str | int) -> dict[str, Any]:
    """Return buttons for the axis of the loss.

    Args:
        is_log: how the axis is at first.
        tick: of the logarithmic axis, see plotly.
    """
    buttons = [
        {"label": name, "method": "relayout", "args": [{"yaxis.type": kind, "yaxis.dtick": tick}]}
        for name, kind, tick in (("linear", "linear", None), ("logarithmic", "log", tick))
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "x": 1,
        "xanchor": "right",
        "y": -0.12,
        "yanchor": "top",
        "active": int(is_log),
    }
