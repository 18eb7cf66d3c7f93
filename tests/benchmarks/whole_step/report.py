"""Shows rows of the whole-step benchmark as tables, and says which targets they reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any, NamedTuple

from benchmarks.whole_step.candidates import BASELINE, CANDIDATES, FUSED_BASELINE
from benchmarks.whole_step.models import BERT, MLP, SMALL_BERT
from benchmarks.whole_step.row import Key, Row
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

NOT_MEASURED = "not measured"
COLUMNS = (
    *("mode", "candidate", "samples/s", "speed, x", "x of its mode", "peak MiB", "memory, x"),
    *("launches", "launches, x", "loss", "loss, x", "optimizer"),
)
EXPLAINED = f"""\
"x" is a multiple of {BASELINE}, eager, which took turns with each row; speeds are medians of
rounds, with their quartiles. "of its mode" compares with {BASELINE} in the row's own mode
({FUSED_BASELINE} where that cannot be captured). Launches are kernels that the GPU ran."""


class Target(NamedTuple):
    """What a ratio of `step_row.RATIOS` is to be: a speed at least, all else at most.

    Attributes:
        is_must: False for an aim, which may be missed.
    """

    key: Key
    ratio: str
    bound: float
    is_must: bool

    def is_reached(self, value: float) -> bool:
        return value >= self.bound if self.ratio == "speed" else value <= self.bound


_O2 = Key("eager", BERT, "O2")
#: The musts were published, for an A100: by how much apex's O2 was faster, and smaller.
TARGETS = (
    Target(_O2, "speed", 1.24, is_must=True),
    Target(_O2, "peak_bytes", 0.85, is_must=True),
    Target(_O2, "speed", 1.3, is_must=False),
    Target(_O2, "peak_bytes", 0.8, is_must=False),
    Target(_O2._replace(model=SMALL_BERT), "speed", 1.5, is_must=False),
    Target(_O2._replace(model=MLP), "speed", 1.5, is_must=False),
)


def target_lines(rows: Mapping[Key, Row]) -> list[str]:
    """Return a line for each target."""
    return [_line_of(target, rows.get(target.key)) for target in TARGETS]


def missed(rows: Mapping[Key, Row]) -> list[str]:
    """Return the lines of what must be reached and was not, as far as it was tried."""
    tried = [(one, rows[one.key]) for one in TARGETS if one.is_must and one.key in rows]
    return [_line_of(target, row) for target, row in tried if _outcome(target, row) != "reached"]


def _line_of(target: Target, row: Row | None) -> str:
    name = {"speed": "speed", "peak_bytes": "memory"}[target.ratio]
    wanted = "must be" if target.is_must else "is to be"
    side = "at least" if target.ratio == "speed" else "at most"
    value = None if row is None else row.ratio(target.ratio)
    found = "" if value is None else f" {value:.3f},"
    bound = f"{wanted} {side} {target.bound:g}"
    return f"{target.key}: {name}{found} {bound}: {_outcome(target, row)}"


def _outcome(target: Target, row: Row | None) -> str:
    value = None if row is None else row.ratio(target.ratio)
    if value is not None:
        return "reached" if target.is_reached(value) else "MISSED"
    return NOT_MEASURED if row is None or row.error is None else row.error


def as_text(
    about: Mapping[str, Any],
    rows: Mapping[Key, Row],
    missing: Mapping[Key, str],
    targets: Iterable[str],
) -> str:
    """Return everything as Markdown."""
    parts = ["\n".join(f"- {key}: {value}" for key, value in about.items()), EXPLAINED]
    for model in dict.fromkeys(key.model for key in rows):
        parts += [f"## {model}", table(model, rows)]
        errors = [f"- {key}: {row.error}" for key, row in rows.items() if row.error]
        parts += ["\n".join(line for line in errors if f", {model}, " in line)]
    if lines := [f"- {line}" for line in targets]:
        parts += ["## Targets", "\n".join(lines)]
    if missing:
        lines = missing_lines(missing)
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def missing_lines(missing: Mapping[Key, str]) -> list[str]:
    """Return a line for all models of a mode that lack the same candidates for the same reason."""
    models: dict[tuple[str, str, str], list[str]] = {}
    for (why, mode, model), candidates in grouped(missing).items():
        names = "all" if len(candidates) == len(CANDIDATES) else ", ".join(candidates)
        models.setdefault((mode, names, why), []).append(model)
    return [
        f"- {mode}; {', '.join(of)}; {names}: {why}" for (mode, names, why), of in models.items()
    ]


def grouped(missing: Mapping[Key, str]) -> dict[tuple[str, str, str], list[str]]:
    """Return (why, mode, model) -> candidates."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, why in missing.items():
        groups.setdefault((why, key.mode, key.model), []).append(key.candidate)
    return groups


def table(model: str, rows: Mapping[Key, Row]) -> str:
    """Return the table of a model."""
    shown = Table(*COLUMNS, box=MARKDOWN)
    for key, row in rows.items():
        if key.model == model:
            shown.add_row(*cells(row, mode_speed(key, rows)))
    text = StringIO()
    Console(file=text, width=1000).print(shown)  # a cell in two lines would be no Markdown
    return "\n".join(line.strip() for line in text.getvalue().splitlines() if line.strip())


def mode_speed(key: Key, rows: Mapping[Key, Row]) -> float | None:
    """Return how fast the baseline is in a row's mode, as a multiple of the eager one."""
    for name in (BASELINE, FUSED_BASELINE):
        row = rows.get(key._replace(candidate=name))
        if row is not None and row.speed is not None:
            return row.speed.median
    return None


def cells(row: Row, speed_of_mode: float | None) -> tuple[str, ...]:
    """Return a row as COLUMNS names it."""
    own = row.own
    if own is None or row.speed is None:
        return (row.key.mode, row.key.candidate, "see below", *[""] * (len(COLUMNS) - 3))
    spread = f"{row.speed.median:.2f} ({row.speed.lower:.2f}-{row.speed.upper:.2f})"
    of_mode = None if speed_of_mode is None else row.speed.median / speed_of_mode
    peak = None if own.peak_bytes is None else own.peak_bytes / 2**20
    losses = ("not finite", "not finite")
    if math.isfinite(own.final_loss):
        losses = (f"{own.final_loss:.4f}", _number(row.ratio("final_loss"), ".4f"))
    return (
        *(row.key.mode, row.key.candidate, f"{own.samples_per_second:.1f}", spread),
        _number(of_mode, ".2f"),
        *(_number(peak, ".0f"), _number(row.ratio("peak_bytes"), ".3f")),
        *(_number(own.launches, "d"), _number(row.ratio("launches"), ".2f")),
        *losses,
        row.optimizer,
    )


def _number(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else format(value, form)
