"""``amp-patch compare``: the same script at several levels, module by module."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from amp_patch.tools import options
from amp_patch.tools.launch import exit_code_of, filled, python_command, temporary_folder

from . import report, runs
from .comparison import Comparison, compare


@options.script_command()
@options.levels("O0,O1", "Which are compared with O0.")
@options.steps("How many optimizer steps; the script is ended after them.", default=1)
@options.seed("Of all random numbers.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for compare.json and compare.txt.",
)
def command(
    levels: list[str], steps: int, seed: int, out: Path | None, script: tuple[str, ...]
) -> None:
    """Compare levels with fp32, output by output and gradient by gradient.

    The script after -- runs once per level, and twice at O0, from the same seed and on the same
    data. Modules that make an error stand above those that hand one on. Ctrl-C keeps the levels
    that are compared by then.

    In ARGS {level} stands for the level, and {run} for a name of the run.

        amp-patch compare --levels O1,O4 --steps 3 -- train.py --epochs 1
    """
    words = python_command(script)
    folder = None if out is None else options.writable_folder(out)
    asked = [level for level in levels if level != "O0"] or ["O0"]
    with temporary_folder() as temporary:
        found = Comparing(words, temporary, steps, seed)
        found.run(asked)
    columns = max(60, shutil.get_terminal_size((80, 24)).columns)
    texts = ["\n".join(report.lines(one, steps, min(columns, 100))) for one in found.comparisons]
    compared = {one.level for one in found.comparisons}
    texts += [
        f"{level} was not compared{' to its end' * (level in compared)}: {reason}"
        for level, reason in found.failures.items()
    ]
    if found.last_lines:
        click.echo(f"The last lines of the script:\n{found.last_lines}", err=True)
    click.echo("\n\n".join(texts))
    if folder is not None:
        content = report.as_json(found.comparisons, steps, seed, found.failures)
        (folder / "compare.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "compare.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    if found.code:
        click.echo("Interrupted: this is what was compared until then.", err=True)
    if found.code or found.failures or not found.comparisons:
        raise click.exceptions.Exit(found.code or 1)


class Comparing:
    """Runs a script at levels and at O0, and compares the records.

    Args:
        command: of `python_command`.
        folder: for the runs.
        steps: how many are compared.
        seed: of all random numbers.

    Attributes:
        comparisons: one for each level that could be compared.
        failures: level -> why it was not, or not to its end.
        last_lines: what the first script printed last that failed before it could be compared.
        code: the exit code where an interruption ended it, else 0.
    """

    def __init__(self, command: Sequence[str], folder: Path, steps: int, seed: int) -> None:
        self._command, self._folder, self._steps, self._seed = command, folder, steps, seed
        self.comparisons: list[Comparison] = []
        self.failures: dict[str, str] = {}
        self.last_lines = ""
        self.code = 0
        # By the steps that are skipped: two runs of O0 that skip them.
        self._references: dict[str, list[dict[str, Any]]] = {}

    def run(self, levels: Sequence[str]) -> None:
        """Compare these; levels after an interruption are not begun."""
        for level in levels:
            records: list[dict[str, Any]] = []
            try:
                click.echo(f"{level} ...", err=True)
                records.append(self._record(level, level))
                records += self._twins(records[0]["skipped"])
            except runs.NoRecord as error:
                self.failures[level] = str(error)
                self.last_lines = self.last_lines or error.last_lines
                if error.is_futile:
                    return
                continue
            except KeyboardInterrupt as interruption:
                self.code = exit_code_of(interruption)
                if records:  # the second run of O0 is for the noise only
                    records += self._references.get(json.dumps(records[0]["skipped"]), [])
            self._compare(level, records)
            if self.code:
                return

    def _twins(self, skipped: list[list[int]]) -> list[dict[str, Any]]:
        """Return two runs of O0 that skip the steps that a level has skipped."""
        found = self._references.setdefault(json.dumps(skipped), [])
        if not found:
            click.echo("O0, twice ...", err=True)
        while len(found) < 2:
            name = f"reference-{len(self._references)}-{len(found) + 1}"
            found.append(self._record("O0", name, skipped))
        return found

    def _record(
        self, level: str, name: str, skipped: Sequence[Sequence[int]] = ()
    ) -> dict[str, Any]:
        return runs.record(
            filled(self._command, level, name),
            self._folder / name,
            level,
            steps=self._steps,
            seed=self._seed,
            skipped=skipped,
        )

    def _compare(self, level: str, records: Sequence[dict[str, Any]]) -> None:
        if len(records) < 2:
            self.failures[level] = "interrupted"
            return
        one, reference, again = [*records, None][:3]
        assert one is not None
        assert reference is not None
        self.comparisons.append(compare(level, one, reference, again))
        if one["error"] is not None:
            self.failures[level] = f"it ended early: {one['error']}"
