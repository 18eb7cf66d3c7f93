"""``amp-patch stats -- script.py``: what a script computes in, and what it casts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click

from amp_patch.debug import op_table, spoiled_buffers

from . import options
from .observed import observe


@options.script_command()
@options.steps(
    "End the script when every optimizer has made N steps; without it, it runs to its end."
)
@options.opt_level()
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the numbers there, too.",
)
def command(
    steps: int | None, opt_level: str | None, file: Path | None, script: tuple[str, ...]
) -> None:
    """Count the operators of a script by dtype, and its casts.

    Ctrl-C ends the script, and shows what was counted until then.

        amp-patch stats --steps 20 -- train.py --epochs 1
    """
    if file is not None:
        options.file_to_write("--json", file)
    tool = "amp_patch.tools.stats_child:start"
    observed = observe(tool, script, {"steps": steps or 0}, opt_level)
    found = observed.first()
    show(found)
    if found["buffers"]:
        click.echo("\n".join(["", *spoiled_buffers.lines(found["buffers"])]))
    if len(observed.found) > 1:
        count = len(observed.found)
        click.echo(f"These are of the first of {count} processes that trained.", err=True)
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    observed.end()


def show(found: dict[str, Any]) -> None:
    """Print statistics: as wide as the terminal where rich is installed, else as plain text.

    Args:
        found: as `OpStats.to_json` returns them.
    """
    if importlib.util.find_spec("rich") is None:
        click.echo(op_table.table(found))
        return
    console, new_table = _rich()
    for title, header, rows in op_table.tables(found):
        table = new_table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column(header[0], overflow="fold")
        for name in header[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    console.print(op_table.summary(found), highlight=False)


def _rich() -> tuple[Any, Any]:
    parts = importlib.import_module("amp_patch.tools.rich_parts")
    return parts.Console(markup=False, emoji=False), parts.Table
