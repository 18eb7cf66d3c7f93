"""Shows what was measured: on the screen, as JSON and in docs/; it measures nothing."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.rounds import Spread
from rich.box import SIMPLE_HEAD
from rich.table import Table

RESULTS = Path(__file__).with_name("results") / "cpu.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
COLUMNS = ("what", "median", "quartiles", "must be", "is")
SHOWN_TO_USERS = 3  # of the columns: targets are for who works on the code


@dataclass(frozen=True)
class Row:
    """One line of the results: a count, or the spread of a time or a ratio."""

    what: str
    value: int | Spread
    unit: str = ""
    at_most: float | None = None

    @property
    def typical(self) -> float:
        return self.value.median if isinstance(self.value, Spread) else self.value

    @property
    def reached(self) -> bool | None:
        return None if self.at_most is None else self.typical <= self.at_most

    def cells(self) -> tuple[str, ...]:
        """Return the row as COLUMNS names it."""
        spread = self.value if isinstance(self.value, Spread) else None
        return (
            self.what,
            _number(self.typical, self.unit),
            f"{spread.lower:.2f} - {spread.upper:.2f}" if spread else "exact",
            "" if self.at_most is None else f"<= {_number(self.at_most, self.unit)}",
            {None: "", True: "yes", False: "NO"}[self.reached],
        )


def _number(value: float, unit: str) -> str:
    return f"{value:.2f} {unit}" if unit else f"{value:g}"


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    return found[1] if found else platform.machine()


def machine() -> dict[str, str | int | None]:
    """Describe the machine by its kind alone."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def as_table(rows: list[Row]) -> Table:
    table = Table(*COLUMNS, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row.cells())
    return table


def save(rows: list[Row]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    measured = [{**asdict(row), "reached": row.reached} for row in rows]
    text = json.dumps({"machine": machine(), "rows": measured}, indent=2)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def as_markdown(rows: list[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    table = "\n".join(f"| {' | '.join(line[:SHOWN_TO_USERS])} |" for line in lines)
    about = machine()
    return (
        f"Measured on {about['date']}, one thread of {about['processor']} "
        f"({about['cores']} cores), torch {about['torch']}.\n\n{table}\n"
    )


def write_page(rows: list[Row]) -> None:
    """Replace what stands between the benchmark markers of the page."""
    begin, end = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, end_mark, after = rest.partition(end)
    if not (mark and end_mark):
        raise SystemExit(f"{PAGE.name} must hold the lines {begin} and {end}; add them.")
    PAGE.write_text(f"{before}{begin}\n{as_markdown(rows)}{end}{after}", encoding="utf-8")
