"""``amp-patch compare``: the same script at several levels, module by module."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from amp_patch.tools.launch import python_command
from amp_patch.tools.options import known_levels, writable_folder

from . import report, runs
from .comparison import Comparison, compare


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--levels",
    default="O0,O1",
    show_default=True,
    callback=known_levels,
    metavar="LEVELS",
    help="Which are compared with O0.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many optimizer steps; the script is ended after them.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of all random numbers.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for compare.json and compare.txt.",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def command(
    levels: list[str], steps: int, seed: int, out: Path | None, script: tuple[str, ...]
) -> None:
    """Compare levels with fp32, output by output and gradient by gradient.

    The script after -- runs once per level, and twice at O0, from the same seed and on the same
    data. Modules that make an error stand above those that hand one on.
    """
    words = python_command(script)
    folder = None if out is None else writable_folder(out)
    asked = [level for level in levels if level != "O0"] or ["O0"]
    with tempfile.TemporaryDirectory() as temporary:
        comparisons, failures = _compare(words, Path(temporary), asked, steps, seed)
    columns = max(60, shutil.get_terminal_size((80, 24)).columns)
    texts = ["\n".join(report.lines(one, steps, min(columns, 100))) for one in comparisons]
    texts += [f"{level} was not compared: {reason}" for level, reason in failures.items()]
    click.echo("\n\n".join(texts))
    if folder is not None:
        found = report.as_json(comparisons, steps, seed, failures)
        (folder / "compare.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "compare.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    if not comparisons:
        raise click.exceptions.Exit(1)


def _compare(
    words: Sequence[str], folder: Path, levels: Sequence[str], steps: int, seed: int
) -> tuple[list[Comparison], dict[str, str]]:
    """Return the comparisons, and why there is none of a level."""
    comparisons: list[Comparison] = []
    failures: dict[str, str] = {}
    references: dict[str, Any] = {}
    for level in levels:
        click.echo(f"{level} ...", err=True)
        try:
            one = runs.record(words, folder / level, level, steps=steps, seed=seed)
            reference, again = _references(words, folder, references, one, steps, seed)
        except runs.NoRecord as error:
            failures[level] = str(error)
            continue
        comparison = compare(level, one, reference, again)
        if one["error"] is not None:
            failures[level] = f"it ended early: {one['error']}"
        comparisons.append(comparison)
    return comparisons, failures


def _references(
    words: Sequence[str],
    folder: Path,
    known: dict[str, Any],
    record: dict[str, Any],
    steps: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two runs of O0 that skip the steps that a level has skipped."""
    key = json.dumps(record["skipped"])
    if key not in known:
        click.echo("O0, twice ...", err=True)
        place = folder / f"reference-{len(known)}"
        known[key] = tuple(
            runs.record(
                words,
                place / str(number),
                "O0",
                steps=steps,
                seed=seed,
                skipped=record["skipped"],
            )
            for number in range(2)
        )
    found: tuple[dict[str, Any], dict[str, Any]] = known[key]
    return found
