"""Figures as they are shown everywhere: in tables, plots and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .comparison import Row, Spread

UNKNOWN = "–"

#: One colour and one dash a level, in every plot: of Okabe and Ito's palette, which colour-blind
#: people can tell apart. Dashes, as points on and off, tell them apart without colours.
COLORS: Mapping[str, str] = {
    "O0": "#333333",
    "O1": "#E69F00",
    "O2": "#0072B2",
    "O3": "#D55E00",
    "O4": "#009E73",
    "O5": "#CC79A7",
}
#: Bars are so opaque that a spread in this colour is seen on each of them, on O0's too.
BAR_OPACITY = 0.7
SPREAD_COLOR = "#111111"
DASHES: Mapping[str, tuple[int, ...]] = {
    "O0": (),
    "O1": (6, 2),
    "O2": (2, 1),
    "O3": (8, 2, 2, 2),
    "O4": (4, 2),
    "O5": (6, 2, 1, 2, 1, 2),
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def three_figures(value: float) -> str:
    """Return a number above 0 with three figures, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """Return a loss with four figures."""
    return UNKNOWN if value is None else f"{value:.4g}"


def share(value: float | None) -> str:
    """Return a share of something in percent, with its sign."""
    if value is None or math.isnan(value):
        return UNKNOWN
    words = f"{value:+.1%}" if abs(value) < 10 else f"{value:+.0%}"
    return "+0.0%" if words == "-0.0%" else words


def times(value: float | None) -> str:
    """Return a factor."""
    return UNKNOWN if value is None else f"{value:.2f}x"


def range_of(spread: Spread | None) -> str:
    """Return how far a factor varied."""
    return UNKNOWN if spread is None else f"{spread.low:.2f}–{spread.high:.2f}"


def range_of_sizes(spread: Spread | None) -> str:
    """Return how far a number of bytes varied, in one unit."""
    if spread is None:
        return UNKNOWN
    unit, name = unit_of(spread.high)
    return f"{three_figures(spread.low / unit)}–{three_figures(spread.high / unit)} {name}"


def unit_of(value: float) -> tuple[int, str]:
    """Return the unit in which a number of bytes has at most four figures before the point."""
    power = min(len(_UNITS) - 1, int(math.log(max(value, 1), 1024)))
    return 1024**power, _UNITS[power]


def size(value: float | None) -> str:
    """Return a number of bytes in units of 1024."""
    if value is None:
        return UNKNOWN
    unit, name = unit_of(value)
    return f"{three_figures(value / unit)} {name}"


def memory(row: Row) -> str:
    """Return how much memory a level took, and how much of O0's that is."""
    ratio = f", {times(row.memory_ratio)}" if row.memory_ratio else ""
    return f"{size(row.memory)}{ratio}"


def rate(seconds: float | None) -> str:
    """Return steps a second."""
    return UNKNOWN if not seconds else three_figures(1 / seconds)


def scale(value: float | None) -> str:
    """Return a loss scale: a power of two as such where it is large."""
    if value is None:
        return UNKNOWN
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 1 <= value <= 1024:
        return f"2^{exponent - 1}"
    return f"{value:g}"


def skips(row: Row) -> str:
    """Return how many steps were skipped, of how many."""
    return f"{row.skipped}/{row.steps}" if row.steps else UNKNOWN


def culprits(row: Row, most: int = 3) -> str:
    """Return which parameters' gradients were inf or NaN, those of most steps first."""
    names = list(row.culprits)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
