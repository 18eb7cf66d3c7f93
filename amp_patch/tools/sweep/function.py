"""A training function in place of a script: `amp_patch.sweep`, and the process that calls it.

``python -m amp_patch.tools.sweep.function FILE`` is that process. Knows how a function gets there;
the rest is the sweep's, as of the command.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import pickle
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from amp_patch.tools.errors import BadArguments
from amp_patch.tools.launch import TOOL, signals_interrupt
from amp_patch.tools.options import LEVELS, SEEDS

from . import sweep
from .settings import Settings
from .sweep import Result, Sweep

_FILE = "function.pickle"
#: What does nothing when it is called, and how it is run.
_LATER = (
    ("a coroutine function", inspect.iscoroutinefunction, "asyncio.run({}())"),
    ("a generator function", inspect.isgeneratorfunction, "list({}())"),
)


def run(
    train_fn: Callable[..., Any],
    *,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """See `amp_patch.sweep`.

    Args:
        train_fn, out, resume: see there.
        options: all others, the names of which `Settings` has, too.
    """
    name = _name_of(train_fn)
    if TOOL in os.environ:
        raise RuntimeError(
            "amp_patch.sweep() was called by the training that it sweeps; call it outside of "
            f"{name}(), and in its module under if __name__ == '__main__'."
        )
    sent = _sent(train_fn, _takes_level(train_fn))
    prepared = _prepared(name, out, resume, options)
    file = prepared.folder.resolve() / _FILE
    file.write_bytes(sent)
    prepared.command = [sys.executable, "-m", __name__, str(file)]
    try:
        with signals_interrupt():
            result = prepared.run()
    finally:
        file.unlink()
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def _prepared(name: str, out: Any, resume: Any, options: Mapping[str, Any]) -> Sweep:
    """Return the sweep of a function, before anything runs; see `run`.

    Raises:
        ValueError: as `amp_patch.sweep`.
    """
    checked: dict[str, Any] = {
        "levels": _levels(options["levels"]),
        "steps": None if options["steps"] is None else _count("steps", options["steps"]),
        "repeat": _count("repeat", options["repeat"]),
        "seed": _seed(options["seed"]),
        "tolerance": _share(options["tolerance"]),
        "timeout": _seconds(options["timeout"]),
    }
    # what was left at its default is not given: a sweep that goes on has its own
    defaults = Settings([]).as_json()
    given = {one: value for one, value in checked.items() if value != defaults[one]}
    if resume is not None and out is not None:
        raise ValueError("resume writes to its own folder; got out too; leave that out")
    try:
        if resume is None:
            settings = Settings(command=[name], is_function=True, **given)
            return sweep.begun(None if out is None else Path(os.fsdecode(out)), settings, [])
        folder = Path(os.fsdecode(resume))
        return sweep.resumed(folder, given, functools.partial(_refuse_other, name))
    except BadArguments as error:
        raise ValueError(error.message) from error


def call(file: str) -> None:
    """Call the function that `run` wrote to a file, with the level where it takes that."""
    content = pickle.loads(Path(file).read_bytes())
    sys.path[:] = content["path"]
    train_fn, takes_level = pickle.loads(content["function"])
    train_fn(*[os.environ["AMP_PATCH_OPT_LEVEL"]] * takes_level)


def _sent(train_fn: Callable[..., Any], takes_level: bool) -> bytes:
    """Return a function, and what `call` needs to call it, as its process gets them.

    Raises:
        TypeError: it holds what cannot be sent to another process.
    """
    try:
        function = cloudpickle.dumps((train_fn, takes_level))
    except Exception as error:  # whatever an object of the user's raises
        raise TypeError(
            "train_fn, and the globals that it uses, must be such as cloudpickle can send to "
            f"another process; got {_name_of(train_fn)}, of which it says: {error}; make what "
            "cannot be sent, as a lock or an open file, inside of the function."
        ) from error
    return pickle.dumps({"path": sys.path, "function": function})


def _takes_level(train_fn: Callable[..., Any]) -> bool:
    """Return whether a function has to be called with one argument, and is not without.

    Raises:
        TypeError: it is no function that trains when it is called, or needs more.
    """
    if not callable(train_fn):
        if isinstance(train_fn, str | os.PathLike):
            raise TypeError(
                f"train_fn must be a function that trains; got {train_fn!r}; for a script call "
                f"amp-patch sweep -- {shlex.quote(os.fsdecode(train_fn))}"
            )
        raise TypeError(
            f"train_fn must be a function that trains; got {type(train_fn).__name__}; call "
            "amp_patch.sweep(train), without parentheses after train."
        )
    for kind, is_kind, mend in _LATER:
        if is_kind(train_fn):
            raise TypeError(
                f"train_fn must train when it is called; got {_name_of(train_fn)}, {kind}; call "
                f"amp_patch.sweep(lambda: {mend.format(_name_of(train_fn))})."
            )
    signature = inspect.signature(train_fn)
    for arguments in ((), ("O1",)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    raise TypeError(
        f"train_fn must take no argument, or the level alone; got {_name_of(train_fn)}{signature}; "
        "call amp_patch.sweep(functools.partial(train, ...))."
    )


# Numbers and names of NumPy and torch are taken, as plain ones: JSON holds no others.


def _levels(given: Any) -> list[str]:
    """Return names of levels, each once; those of a set in the order of all levels.

    Raises:
        ValueError: one is none, or there is none.
    """
    try:
        several = given.split(",") if isinstance(given, str) else given
        names = [str(one).strip().upper() for one in several]
    except TypeError:  # it cannot be iterated over
        names = []
    if not names or any(name not in LEVELS for name in names):
        raise ValueError(
            f"levels must be some of {', '.join(LEVELS)}; got {given!r}; call "
            "amp_patch.sweep(train, levels=['O0', 'O1'])."
        )
    return sorted(set(names)) if isinstance(given, set | frozenset) else list(dict.fromkeys(names))


def _count(name: str, given: Any, least: int = 1) -> int:
    """Return a whole number.

    Raises:
        ValueError: it is less than `least`, or none.
    """
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if number < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}; got {given!r}; call "
            f"amp_patch.sweep(train, {name}={least or 1})."
        )
    return number


def _seed(given: Any) -> int:
    seed = _count("seed", given, least=0)
    if seed >= SEEDS:
        raise ValueError(
            f"seed must be below 2**32, for NumPy takes no other; got {given!r}; call "
            "amp_patch.sweep(train, seed=1)."
        )
    return seed


def _number(given: Any) -> float:
    """Return what is a number as such; NaN for anything else."""
    try:
        return math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, RuntimeError):  # of torch, for several numbers
        return math.nan


def _seconds(given: Any) -> float | None:
    seconds = None if given is None else _number(given)
    if seconds is None or 0 < seconds < math.inf:
        return seconds
    raise ValueError(
        f"timeout must be seconds above 0, or None for no limit; got {given!r}; call "
        "amp_patch.sweep(train, timeout=600)."
    )


def _share(given: Any) -> float:
    """Return a share, of which 5 would be 500%.

    Raises:
        ValueError: it is none.
    """
    share = _number(given)
    if not 0 <= share < 1:
        raise ValueError(
            "tolerance must be a share of the loss, a number from 0 to below 1; got "
            f"{given!r}; call amp_patch.sweep(train, tolerance=0.05) for 5%."
        )
    return share


def _refuse_other(name: str, settings: Settings, folder: Path) -> Sequence[str]:
    """Refuse a sweep that goes on with another function, or a script's; return no command yet.

    Raises:
        ValueError: it is such a one.
    """
    if settings.command != [name]:
        raise ValueError(
            f"a sweep that goes on must keep its function or script, {' '.join(settings.command)}; "
            f"got {name}; call {settings.goes_on_by(folder)}."
        )
    return []


def _name_of(train_fn: Any) -> str:
    function = getattr(train_fn, "func", train_fn)  # of functools.partial
    return str(getattr(function, "__qualname__", type(function).__name__))


if __name__ == "__main__":
    call(sys.argv[1])
