"""``amp-patch check script.py``: names mistakes in scripts without running them; needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from amp_patch.tools.errors import BadArguments

from .project import Project
from .rules import RULES
from .script import findings
from .source import Unreadable

__all__ = ["command"]


def _list_rules(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        width = max(map(len, RULES))
        for rule in RULES.values():
            click.echo(f"{rule.name:{width}}  {rule.line}")
        context.exit()


@click.command()
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_rules,
    help="Name the rules, and look at nothing.",
)
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH...",
)
def command(paths: tuple[Path, ...]) -> None:
    """Name mistakes in training scripts without running them.

    PATH is a script, a notebook, or a folder with these in it; what a script imports of its own
    project is read with it. What is found is printed as `file:line: rule: what was found; the
    mend`. A comment `# amp-patch: ignore[rule]` on the line silences a rule. Exit code: 0 nothing
    was found, 1 something was, 2 a file is not Python.

        amp-patch check train.py src
    """
    scripts = list(dict.fromkeys(_scripts(paths)))
    project = Project(scripts, [*filter(Path.is_dir, paths), Path.cwd()])
    told: set[tuple[str, str]] = set()
    unreadable = False
    for path in scripts:
        try:
            script = project.read(path)
            for finding in findings(script, project if project.is_started(script) else None):
                if (finding.place, finding.rule) not in told:
                    told.add((finding.place, finding.rule))
                    click.echo(f"{finding.place}: {finding.rule}: {finding.text}")
        except Unreadable as error:
            unreadable = True
            click.echo(f"amp-patch check: a script must be Python; got {error}", err=True)
    sys.exit(2 if unreadable else int(bool(told)))


def _scripts(paths: tuple[Path, ...]) -> Iterator[Path]:
    """Yield files, and those of folders in the order of their names."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(_files_in(path))
        if not inside:
            raise BadArguments(f"a folder must have Python scripts in it; got none in {path}")
        yield from inside


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield scripts and notebooks below a folder; what is hidden or installed is passed."""
    for above, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not _is_passed(Path(above, one))]
        for path in (Path(above, name) for name in names):
            is_shown = path.suffix in (".py", ".ipynb") and not path.name.startswith(".")
            if is_shown and path.is_file():  # and no link that leads nowhere
                yield path


def _is_passed(folder: Path) -> bool:
    is_environment = any((folder / one).exists() for one in ("pyvenv.cfg", "conda-meta"))
    return folder.name.startswith(".") or folder.name == "__pycache__" or is_environment
