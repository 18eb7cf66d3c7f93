"""Statistics of operators as tables of plain text; knows their JSON form only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DTYPES = ("float16", "bfloat16", "float32")


def table(stats: dict[str, Any]) -> str:
    """Return statistics as tables, the operators that are called most first.

    Args:
        stats: as `OpStats.to_json` returns them.
    """
    lines = []
    for title, header, rows in tables(stats):
        lines += [title, *_aligned([header, *rows]), ""]
    return "\n".join([*lines, summary(stats)])


def tables(stats: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, header and rows of each table that is not empty."""
    calls = [
        (f"{phase.capitalize()}: calls", [phase, *_DTYPES, "other"], _calls(stats["calls"], phase))
        for phase in ("forward", "backward", "step")
    ]
    casts = [[f"{one['of']}s", one["from"], one["to"], str(one["casts"])] for one in stats["casts"]]
    found = [*calls, ("Casts", ["of", "from", "to", "casts"], casts)]
    return [one for one in found if one[2]]


def summary(stats: dict[str, Any]) -> str:
    """Return a sentence or two of casts."""
    made = sum(one["casts"] for one in stats["casts"])
    launches = stats["bulk_casts"]
    return (
        f"{made} tensors were cast ({launches} launch{'' if launches == 1 else 'es'} cast many at "
        f"once). Weights were read {stats['cache_hits']} times from the cache and "
        f"{stats['half_weights']} times as they are stored in half: {stats['casts_avoided']} casts "
        "of weights were avoided."
    )


def _calls(calls: Sequence[dict[str, Any]], phase: str) -> list[list[str]]:
    rows: dict[str, dict[str, int]] = {}
    for one in calls:
        if one["phase"] == phase:
            dtype = one["dtype"] if one["dtype"] in _DTYPES else "other"
            row = rows.setdefault(one["operator"], {})
            row[dtype] = row.get(dtype, 0) + one["calls"]
    ordered = sorted(rows.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    return [
        [name, *(str(row.get(dtype, "")) for dtype in (*_DTYPES, "other"))] for name, row in ordered
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
