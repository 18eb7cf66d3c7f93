"""``amp-patch sweep -- script.py``: one training at several levels, compared."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from amp_patch.tools import options
from amp_patch.tools.errors import BadArguments
from amp_patch.tools.launch import python_command

from .settings import Settings

#: What the extra brings, and how each is imported.
NEEDED = ("rich", "matplotlib", "plotly")


@options.script_command()
@options.levels(",".join(options.LEVELS), "Levels to train at, in this order.")
@options.steps("End each run after N steps. Default: when the script ends.")
@click.option(
    "--repeat",
    type=options.Count(min=1),
    default=1,
    show_default=True,
    metavar="R",
    help="Rounds over all levels, one after the other; the spread is over rounds.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=True),
    metavar="DIR",
    help="Folder for all files; must not hold a sweep. Default: amp-sweep, amp-sweep-2 ...",
)
@options.tolerance("5%", "How far the final loss may be from that of O0.", may_be_zero=True)
@click.option(
    "--timeout",
    type=options.Duration(),
    metavar="SECONDS",
    help="Stop a run that takes longer.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with the sweep in DIR: make the runs that have not finished.",
)
@options.seed("Seed of the first round; each further round has the next.")
@click.pass_context
def command(context: click.Context, /, **given: Any) -> None:
    """Run a training script at several levels, and compare speed, memory and loss.

    The script needs no change, whether it uses amp_patch or apex: the level that it asks for is
    overridden. What stands after -- is a script with its arguments, `-m module`, or a program that
    starts Python, such as torchrun. In ARGS {level} stands for the level, and {run} for level and
    round: give each run a folder of its own for what it writes.

    \b
    amp-patch sweep --out results -- train.py --save out/{run}
    amp-patch sweep --steps 200 --repeat 3 -- -m package.train
    amp-patch sweep --resume results
    """
    refuse_without_extra()
    words, resume, out = list(given["script"]), given["resume"], given["out"]
    typed = {
        name: given[name]
        for name in ("levels", "steps", "repeat", "tolerance", "timeout", "seed")
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    sweep = importlib.import_module("amp_patch.tools.sweep.sweep")
    if resume is not None:
        if out is not None:
            raise BadArguments("--resume writes to its own folder; got --out too; leave that out")
        if words:
            typed["command"] = words
        prepared = sweep.resumed(resume, typed, command_again)
    else:
        start = python_command(words)
        prepared = sweep.begun(out, Settings(command=words, **typed), start)
    context.exit(prepared.run().exit_code)


def command_again(settings: Settings, folder: Path) -> Sequence[str]:
    """Return what starts Python with the script of a sweep that goes on.

    Raises:
        BadArguments: it is of a function, or the script is not found from here.
    """
    if settings.is_function:
        raise BadArguments(
            f"a sweep of a function must go on in Python; got {folder}, of {settings.command[0]}; "
            f"call {settings.goes_on_by(folder)}"
        )
    try:
        return python_command(settings.command)
    except BadArguments as error:
        raise BadArguments(
            f"a sweep must go on in the folder in which it began; got {Path.cwd()}, where its "
            f"command, {' '.join(settings.command)}, is not found; go to that folder, and call "
            f"{settings.goes_on_by(folder.resolve())}"
        ) from error


def refuse_without_extra() -> None:
    """Say what to install where one of the packages is missing.

    Raises:
        BadArguments: one is.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BadArguments(
            f"amp-patch sweep needs {' and '.join(missing)}; call pip install 'amp_patch[sweep]'"
        )
