"""The options that several commands have: levels, steps, shares, the script, a folder."""

from __future__ import annotations

import math
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from .errors import BadArguments
from .untrained import refuse_without_amp

#: The names of all levels: those of `amp_patch.levels`, which imports torch.
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
#: Seeds are below this, for NumPy takes no other.
SEEDS = 2**32

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def script_command() -> Callable[[Callable[..., Any]], click.Command]:
    """Return what makes a command of a function: ``amp-patch NAME [OPTIONS] -- SCRIPT [ARGS]...``.

    What follows the script is the script's, after ``--`` also options of the same names. The
    function gets it as ``script``, a tuple of words.
    """
    argument = click.argument(
        "script",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="-- SCRIPT [ARGS]...",
        callback=_script,
    )
    settings = {"allow_interspersed_args": False}
    make = click.command(cls=_ScriptCommand, context_settings=settings)
    return lambda function: make(argument(function))


class _ScriptCommand(click.Command):
    """A command that knows whether ``--`` stands before its script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse options of its own after a script without ``--``: who gets them is not clear."""
        script = self.make_parser(ctx).parse_args(list(args))[0].get("script")
        if isinstance(script, tuple) and "--" not in args[: len(args) - len(script)]:
            own = {name for param in self.params for name in param.opts}
            for word in script[1:]:
                if word.partition("=")[0] in own:
                    raise click.UsageError(_unclear(ctx.command_path, word, script), ctx)
        return super().parse_args(ctx, args)


def _unclear(command: str, word: str, script: Sequence[str]) -> str:
    first = shlex.quote(script[0])
    return (
        f"options of {command} must stand before --, and the script after it; got {word} after "
        f"{first}, and no --; write {command} {word} ... -- {first}, or, where it is the "
        f"script's own option, {command} -- {shlex.join(script)}"
    )


def _script(
    context: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse a script that is sure not to use amp, before anything is begun."""
    if value and not context.resilient_parsing:
        refuse_without_amp(value)
    return value


def opt_level() -> Decorator:
    """Return the option ``--opt-level``."""
    return click.option(
        "--opt-level",
        metavar="LEVEL",
        callback=known_level,
        help="In place of the script's own level.",
    )


def levels(default: str, text: str) -> Decorator:
    """Return the option ``--levels``.

    Args:
        default: names with commas between them.
        text: of the help.
    """
    return click.option(
        "--levels",
        default=default,
        show_default=True,
        metavar="O0,O1,...",
        callback=known_levels,
        help=text,
    )


def steps(text: str, least: int = 1, default: int | None = None) -> Decorator:
    """Return the option ``--steps``.

    Args:
        text: of the help.
        least: the smallest that makes sense.
        default: None for the script's own end.
    """
    return click.option(
        "--steps",
        type=Count(min=least),
        default=default,
        show_default=default is not None,
        metavar="N",
        help=text,
    )


def seed(text: str) -> Decorator:
    """Return the option ``--seed``."""
    numbers = Count(0, SEEDS - 1)
    return click.option(
        "--seed", type=numbers, default=0, show_default=True, metavar="N", help=text
    )


def tolerance(default: str, text: str, may_be_zero: bool) -> Decorator:
    """Return the option ``--tolerance``, a share.

    Args:
        default: as it would be typed.
        text: of the help.
        may_be_zero: whether only what is above 0 makes sense.
    """

    def checked(context: click.Context, param: click.Parameter, value: str) -> float:
        number = share(context, param, value)
        if number == 0 and not may_be_zero:
            raise click.BadParameter(f"{value!r} leaves no tolerance; a share must be above 0.")
        return number

    return click.option(
        "--tolerance",
        default=default,
        show_default=True,
        metavar="SHARE",
        callback=checked,
        help=text,
    )


def share(context: click.Context, param: click.Parameter, value: str) -> float:
    """Read a share, 0.05 or 5%."""
    try:
        number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise click.BadParameter(f"{value!r} is neither a share like 0.05 nor one like 5%.")
    if number >= 1 and not value.endswith("%"):
        raise click.BadParameter(
            f"{value!r} is {number:.0%}, for a share of 1 is all of it; write {value}% if that is "
            "meant."
        )
    return number


class Count(click.IntRange):
    """A whole number within bounds."""

    name = "integer"  # of what is none, click says that it is "not a valid integer"


class Duration(click.FloatRange):
    """A time above 0, which ends: neither inf nor nan.

    Args:
        may_be_zero: whether none is a time, too.
    """

    name = "number"

    def __init__(self, may_be_zero: bool = False) -> None:
        super().__init__(min=0, min_open=not may_be_zero, max=math.inf, max_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        """Return the number; see click."""
        number: float = super().convert(value, param, context)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, context)
        return number


def known_level(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the name of a level."""
    if value is None:
        return None
    found = known_levels(context, param, value)
    if len(found) > 1:
        raise click.BadParameter(f"{value!r} names several levels; give one of them.")
    return found[0]


def known_levels(context: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Check names of levels with commas or spaces between them; each once, in the order given.

    A small letter o will do.
    """
    given = re.split(r"\s*,\s*|\s+", value.strip())
    for name in given:
        if name.upper() not in LEVELS:
            meant = f"O{name[-1:]}"
            mend = f" Did you mean {meant}, with the letter O?" if meant in LEVELS else ""
            levels = ", ".join(map(repr, LEVELS))
            raise click.BadParameter(f"{name!r} is not one of {levels}.{mend}")
    return list(dict.fromkeys(name.upper() for name in given))


def writable_folder(path: Path) -> Path:
    """Return a folder, made where there is none.

    Raises:
        BadArguments: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArguments(
            f"the folder to write to must be one that can be made; got {path}: {error.strerror}"
        ) from error
    try:
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise BadArguments(
            f"the folder to write to must be writable; got {path}: {error.strerror}"
        ) from error


def file_to_write(option: str, file: Path) -> None:
    """Refuse a file that could not be written, before a script runs.

    Raises:
        BadArguments: its folder is not there, or not writable.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise BadArguments(
            f"{option} must name a file in a folder that is there; got {file}; call mkdir -p "
            f"{shlex.quote(str(file.parent))}"
        )
    writable_folder(folder)
