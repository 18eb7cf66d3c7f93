"""``report.html``: one file with the table and the plots, which opens from disk without network."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from plotly import io

from amp_patch import __version__

from . import wording
from .comparison import Comparison, Row
from .figures import figures
from .files import machine
from .outcomes import Run
from .recommendation import Recommendation
from .settings import Settings
from .tables import columns, remarks
from .verdicts import DEVIATES, OK

_PAGE = Path(__file__).with_name("report.template.html")
_CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False}


def write(
    folder: Path,
    settings: Settings,
    started: str,
    comparison: Comparison,
    recommendation: Recommendation,
    runs: Sequence[Run],
) -> None:
    """Write ``report.html``."""
    page = Template(_PAGE.read_text("utf-8")).substitute(
        title=html.escape(f"Levels of {_name(settings)}"),
        level=html.escape(recommendation.level or "No level"),
        reason=_text(recommendation.reason),
        table=_table(comparison),
        remarks="".join(f"<li>{_text(line)}</li>" for line in remarks(comparison)),
        plots=_plots(comparison, runs, settings.tolerance),
        facts=_facts(settings, started, runs),
    )
    (folder / "report.html").write_text(page, "utf-8")


def _text(words: str) -> str:
    """Return a text as HTML, in which no option is broken after its dashes."""
    return re.sub(r"--\w+", r'<span class="nowrap">\g<0></span>', html.escape(words))


def _name(settings: Settings) -> str:
    words = [word for word in settings.command if not word.startswith("-")]
    scripts = [word for word in words if word.endswith(".py")] or words
    return Path(scripts[0]).name if scripts else "a script"


def _table(comparison: Comparison) -> str:
    """Return the table; on narrow screens its cells stand below each other, by their labels."""
    shown = [column for group in columns(comparison) for column in group]
    labels = _labels([name for name, _ in shown])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("level", *(n for n, _ in shown)))
    rows = []
    for row in comparison.rows:
        swatch = f'<i style="background:{wording.COLORS[row.level]}"></i>'
        cells = "".join(
            f'<td data-label="{html.escape(label)}" class="{_class(name, row)}">'
            f"{html.escape(cell(row))}</td>"
            for label, (name, cell) in zip(labels, shown, strict=True)
        )
        rows.append(f"<tr><th>{swatch}{html.escape(row.level)}</th>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _labels(names: Sequence[str]) -> list[str]:
    """Return what the cells of each column are called where those before are not beside them."""
    labels, figure = [], ""
    for name in names:
        says_more = name == "spread" or name.startswith("vs ")  # of the figure before it
        labels.append(f"{figure} {name}" if says_more else name)
        figure = figure if says_more else name
    return labels


def _class(name: str, row: Row) -> str:
    if name != "verdict":
        return "number"
    return {OK: "good", DEVIATES: "warning"}.get(row.verdict.kind, "bad")


def _plots(comparison: Comparison, runs: Sequence[Run], tolerance: float) -> str:
    parts = []
    library: Any = True  # the first plot brings the library, inside of the file
    for name, (title, figure) in figures(comparison, runs, tolerance).items():
        plot = io.to_html(
            figure, full_html=False, include_plotlyjs=library, config=_CONFIG, div_id=f"plot-{name}"
        )
        parts.append(f"<section><h2>{html.escape(title)}</h2>{plot}</section>")
        library = False
    return "\n".join(parts)


def _facts(settings: Settings, started: str, runs: Sequence[Run]) -> str:
    found = machine(runs)
    facts = {
        "Command": shlex.join(settings.command),
        "Started": started,
        "Rounds": str(settings.repeat),
        "Device": str(found.get("device", wording.UNKNOWN)),
        "Threads": str(found.get("threads", wording.UNKNOWN)),
        "Processes": str(found.get("processes", wording.UNKNOWN)),
        "torch": str(found.get("torch", wording.UNKNOWN)),
        "Python": str(found.get("python", wording.UNKNOWN)),
        "System": str(found["platform"]),
        "amp_patch": __version__,
    }
    return "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
        for name, value in facts.items()
    )
