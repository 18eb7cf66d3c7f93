"""Draws what was measured of whole training steps: speed and memory of each candidate and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.whole_step.candidates import BASELINE, CANDIDATES, MODES
from benchmarks.whole_step.models import MODELS
from benchmarks.whole_step.report import TARGETS
from benchmarks.whole_step.results import Results

#: Of each mode: a marker, and a color that who is color-blind can tell from the others.
MARKS = dict(zip(MODES, (("o", "#0072b2"), ("^", "#d55e00"), ("s", "#009e73")), strict=True))
TITLES = {"speed": "speed", "peak_bytes": "memory"}


def draw(results: Results, path: Path) -> None:
    """Draw a line of plots for each model that has rows, a column for each of `TITLES`."""
    import matplotlib.pyplot as plt

    measured = {key.model for key, row in results.rows.items() if row.speed is not None}
    models = [name for name in MODELS if name in measured]
    if not models:
        raise ValueError(f"there must be rows to draw; got none in {results.path}")
    figure, plots = plt.subplots(
        len(models),
        len(TITLES),
        figsize=(10.0, 3.0 * len(models) + 1.0),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for model, line in zip(models, plots, strict=True):
        for ratio, axes in zip(TITLES, line, strict=True):
            _draw(axes, results, model, ratio)
            axes.set_title(f"{model}: {TITLES[ratio]}", fontsize="medium")
    handles, labels = plots[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    about = results.about
    figure.suptitle(
        f"Multiples of {BASELINE}, eager (dotted: what must be reached)\n"
        f"{about['device']}, torch {about['torch']}, {about['date']}"
    )
    figure.savefig(path)
    plt.close(figure)


def _draw(axes: Any, results: Results, model: str, ratio: str) -> None:
    names = list(CANDIDATES)
    for number, mode in enumerate(MODES):
        marker, color = MARKS[mode]
        points: list[tuple[float, float]] = []
        for key, row in results.rows.items():
            value = row.ratio(ratio)
            if (key.mode, key.model) != (mode, model) or value is None:
                continue
            height = names.index(key.candidate) + 0.25 * (number - 1)
            points.append((value, height))
            if ratio == "speed" and row.speed is not None:
                axes.hlines(height, row.speed.lower, row.speed.upper, color=color)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker, color=color, label=mode, markersize=5)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    for target in TARGETS:
        if target.is_must and (target.key.model, target.ratio) == (model, ratio):
            axes.axvline(target.bound, color="black", linestyle=":", linewidth=1.0)
    axes.set_yticks(range(len(names)), names)
    axes.set_yticks([height - 0.5 for height in range(1, len(names))], minor=True)
    axes.grid(axis="y", which="minor", linewidth=0.4)
    axes.tick_params(axis="y", which="minor", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
