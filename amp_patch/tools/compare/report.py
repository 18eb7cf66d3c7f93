"""A comparison as a table for people, in any width from 60 columns, and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amp_patch import __version__
from amp_patch.debug import spoiled_buffers

from .comparison import Comparison, GradientError, ModuleError
from .samples import SAMPLE

#: Rows that a table shows; the JSON holds all.
ROWS = 12


def lines(comparison: Comparison, steps: int, width: int) -> Iterator[str]:
    """Yield the lines of the report on one level.

    Args:
        comparison: of the level with O0.
        steps: how many were compared.
        width: columns, at least 60: names are shortened to fit, figures never.
    """
    many = "1 step" if steps == 1 else f"{steps} steps"
    yield f"{comparison.level} against O0, {many}. Relative errors, worst first."
    for module, function in comparison.nonfinite[:3]:
        yield f"{_shown(module)}: {function} makes inf or NaN of finite values."
    yield from map(_overflow, _beside(comparison)[:3])
    yield from spoiled_buffers.lines(comparison.buffers)
    yield ""
    yield from _table(
        ("module", "step.call", "error", "came with", "x"),
        [_module_row(one) for one in comparison.worst()[:ROWS]],
        width,
    )
    yield ""
    yield from _table(
        ("gradient", "step", "error", "noise"),
        [_gradient_row(one) for one in _worst_gradients(comparison.gradients)[:ROWS]],
        width,
    )
    for note in list(dict.fromkeys(comparison.notes))[:ROWS]:
        yield f"- {note}"


def _beside(comparison: Comparison) -> list[Mapping[str, Any]]:
    """Return the overflows that no function in a forward explains: those of the backward, most."""
    return [one for one in comparison.overflows if one["where"] != "forward"]


def _overflow(one: Mapping[str, Any]) -> str:
    """Return one line about a cause."""
    if one["fits"] is None:
        return f"{one['title']}."
    return f"{one['title']}: of the loss scale {one['scale']:g} alone, {one['fits']:g} fits."


def as_json(
    comparisons: Sequence[Comparison], steps: int, seed: int, failures: dict[str, str]
) -> dict[str, Any]:
    """Return everything as what JSON can hold; an error that is not finite is null."""
    return {
        "schema": 1,
        "versions": {"amp_patch": __version__, "torch": torch.__version__},
        "reference": "O0",
        "steps": steps,
        "seed": seed,
        "sample": SAMPLE,
        "failures": failures,
        "levels": {one.level: _level(one) for one in comparisons},
    }


def _level(comparison: Comparison) -> dict[str, Any]:
    return {
        "modules": [
            {
                "module": one.module,
                "step": one.at_step,
                "call": one.call,
                "error": _number(one.error),
                "came_with": _number(one.came_with),
                "amplification": _number(one.amplification),
                "noise": _number(one.noise),
            }
            for one in comparison.modules
        ],
        "gradients": [
            {
                "parameter": one.parameter,
                "step": one.at_step,
                "error": _number(one.error),
                "noise": _number(one.noise),
            }
            for one in comparison.gradients
        ],
        "nonfinite": [
            {"module": module, "function": function} for module, function in comparison.nonfinite
        ],
        "overflows": [dict(one) for one in comparison.overflows],
        "buffers": [dict(one) for one in comparison.buffers],
        "notes": list(comparison.notes),
    }


def _module_row(one: ModuleError) -> tuple[str, ...]:
    # An error no larger than what the script does not repeat says nothing of the level.
    mark = " noise" if one.error <= 2 * one.noise and one.noise > 0 else ""
    return (
        _shown(one.module) + mark,
        f"{one.at_step}.{one.call}",
        _error(one.error),
        _error(one.came_with),
        "" if math.isinf(one.amplification) else f"{one.amplification:.3g}",
    )


def _gradient_row(one: GradientError) -> tuple[str, ...]:
    return one.parameter, str(one.at_step), _error(one.error), _error(one.noise)


def _worst_gradients(gradients: Iterable[GradientError]) -> list[GradientError]:
    """Return each parameter's worst."""
    seen: dict[str, GradientError] = {}
    for one in gradients:
        seen.setdefault(one.parameter, one)
    return list(seen.values())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield a table whose first column takes what the others leave."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first = min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1))
    for row in (heads, *rows):
        cells = [f"{cell:>{wide}}" for cell, wide in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"{_shortened(row[0], first):{first}}", *cells])
    if not rows:
        yield "(nothing to compare)"


def _shortened(name: str, width: int) -> str:
    """Return a name with the middle left out where it is too long."""
    if len(name) <= width:
        return name
    end = (width - 1) // 2
    return f"{name[: width - 1 - end]}…{name[-end:]}"


def _shown(module: str) -> str:
    return f"{module}(model)" if not module or module.endswith(":") else module


def _error(value: float) -> str:
    return "not finite" if not math.isfinite(value) else f"{value:.2e}"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
