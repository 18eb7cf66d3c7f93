"""The files of a sweep: ``sweep.json``, which docs/sweep.md explains, and two tables in CSV."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amp_patch import __version__
from amp_patch.tools.errors import BadArguments

from .comparison import Comparison, Row
from .outcomes import Outcome, Run
from .recommendation import Recommendation
from .runs import folder_of, seed_of, take
from .settings import Settings
from .steps import Folder
from .warm_up import timed

SCHEMA = 1
NAME = "sweep.json"


def save(
    folder: Path,
    settings: Settings,
    started: str,
    runs: Sequence[Run],
    comparison: Comparison,
    recommendation: Recommendation,
) -> None:
    """Write ``sweep.json``, in one piece: whoever reads it meanwhile finds the last one."""
    content = {
        "schema": SCHEMA,
        "amp_patch": __version__,
        "started": started,
        "settings": settings.as_json(),
        "machine": machine(runs),
        "warm_up_steps": comparison.warm_up,
        "memory_is": memory_is(comparison),
        "levels": [level_as_json(row) for row in comparison.rows],
        "recommendation": asdict(recommendation),
        "runs": [_run_as_json(folder, settings, run) for run in runs],
    }
    path = folder / f"{NAME}.new"
    path.write_text(json.dumps(_strict(content), indent=1, allow_nan=False) + "\n", "utf-8")
    os.replace(path, folder / NAME)


def load(folder: Path) -> tuple[Settings, str, list[Run]]:
    """Return what a folder holds: the settings, when the sweep began, and its finished runs.

    Raises:
        BadArguments: no sweep is there, or one of another schema.
    """
    try:
        found = json.loads((folder / NAME).read_text("utf-8"))
        if found.get("schema") != SCHEMA:
            raise BadArguments(
                f"a sweep that goes on must be of schema {SCHEMA}; got {found.get('schema')} in "
                f"{folder}"
            )
        runs = [
            Run(one["level"], one["round"], Outcome(one["outcome"], one["reason"]), one["seconds"])
            for one in found["runs"]
        ]
        settings, started = Settings.from_json(found["settings"]), found["started"]
    except FileNotFoundError as error:
        raise BadArguments(
            f"the folder to go on in must hold a sweep; got {folder}, in which there is no {NAME}; "
            "begin one by amp-patch sweep --out DIR -- SCRIPT"
        ) from error
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise BadArguments(
            f"the folder to go on in must hold a sweep; got {folder}, whose {NAME} is not as a "
            f"sweep writes it: {error!r}"
        ) from error
    finished = [run for run in runs if run.is_finished]
    for run in finished:
        take(run, Folder(folder_of(folder, run)))
    # Without what it recorded a run is made anew.
    return settings, started, [run for run in finished if run.steps]


def machine(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the scripts ran on, as the first that trained says."""
    about = dict(next((run.about for run in runs if run.about), {}))
    about.pop("resumed", None)  # of a run, not of the machine
    return {"platform": platform.platform(), **about}


def memory_is(comparison: Comparison) -> str:
    """Say what the figures of memory are."""
    if comparison.on_cuda:
        return "most bytes allocated on the CUDA device"
    return "most bytes of living tensors in an early step"


def level_as_json(row: Row) -> dict[str, Any]:
    """Return the figures of a level as ``sweep.json`` has them."""
    figures = asdict(row)
    verdict = figures.pop("verdict")
    return {
        "level": figures.pop("level"),
        "verdict": verdict["kind"],
        "verdict_step": verdict["at_step"],
        "reason": verdict["reason"],
        **figures,
    }


def write_levels(folder: Path, comparison: Comparison) -> None:
    """Write ``levels.csv``: a line for each level."""
    lines = [_flat(level_as_json(row)) for row in comparison.rows]
    _write_csv(folder / "levels.csv", lines)


def write_steps(folder: Path, runs: Sequence[Run], warm_up: int) -> None:
    """Write ``steps.csv``: a line for each step of each run."""
    lines = []
    for run in runs:
        timed_from = warm_up if timed(run.steps, warm_up) else len(run.steps)
        for number, step in enumerate(run.steps):
            lines.append(
                {
                    "level": run.level,
                    "round": run.round,
                    "step": number + 1,
                    "seconds": f"{step.seconds:.6g}",
                    "is_timed": int(number >= timed_from and not step.counted),
                    "loss": step.loss,
                    "loss_scale": step.scale,
                    "skipped": int(step.skipped),
                    "overflows": " ".join(name for name, _ in step.overflows),
                    "gradient_norm": step.norm,
                    "memory_bytes": step.memory or step.tensors,
                    "rss_bytes": step.rss,
                }
            )
    _write_csv(folder / "steps.csv", lines)


def _write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else [])
        writer.writeheader()
        writer.writerows(lines)


def _run_as_json(folder: Path, settings: Settings, run: Run) -> dict[str, Any]:
    return {
        "level": run.level,
        "round": run.round,
        "seed": seed_of(settings, run),
        "outcome": run.outcome.kind,
        "reason": run.outcome.reason,
        "seconds": round(run.seconds, 3),
        "steps": len(run.steps),
        "folder": str(folder_of(folder, run).relative_to(folder)),
    }


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures without nesting: a spread is three columns, names stand beside each other."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if name in ("seconds", "speed_up", "memory_spread", "deviation"):
            for part in ("low", "middle", "high"):
                flat[f"{name}_{part}"] = value and value[part]
        elif name in ("culprits", "unlike_skips"):
            flat[name] = " ".join(map(str, value))
        else:
            flat[name] = value
    return flat


def _strict(value: Any) -> Any:
    """Return what strict JSON can hold: of numbers that are not finite, their names."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf", "-inf"
    return value
