"""A training function in place of a script: `amp_patch.sweep`, and the process that calls it.

``python -m amp_patch.tools.sweep.function FILE`` is that process. Knows how a function gets there;
the rest is the sweep's, as of the command.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from amp_patch.tools.errors import BadArguments
from amp_patch.tools.launch import TOOL, signals_interrupt

from . import sweep
from .settings import LEVELS, Settings
from .sweep import Result

_FILE = "function.pickle"
#: What does nothing when it is called, and how it is run.
_LATER = (
    ("a coroutine function", inspect.iscoroutinefunction, "asyncio.run({}())"),
    ("a generator function", inspect.isgeneratorfunction, "list({}())"),
)


def run(
    train_fn: Callable[..., Any],
    *,
    levels: Sequence[str] = LEVELS,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Result:
    """See `amp_patch.sweep`."""
    if TOOL in os.environ:
        raise RuntimeError(
            "amp_patch.sweep() was called by the training that it sweeps; call it outside of "
            f"{_name_of(train_fn)}(), and in its module under if __name__ == '__main__'."
        )
    sent = _sent(train_fn, _takes_level(train_fn))
    given = {"levels": _checked_levels(levels), "command": [_name_of(train_fn)], **options}
    _refuse_share(options["tolerance"])
    _refuse_numbers(**options)
    try:
        if resume is None:
            prepared = sweep.begun(None if out is None else Path(out), Settings(**given), [])
        elif out is None:
            prepared = sweep.resumed(Path(resume), given, lambda words: [])
        else:
            raise BadArguments("resume writes to its own folder; got out too; leave that out")
    except BadArguments as error:
        # what the command line calls --resume is an argument here
        raise ValueError(re.sub(r"(?<!\S)--(?=(out|resume)\b)", "", error.message)) from error
    prepared.goes_on_by = f"amp_patch.sweep({_name_of(train_fn)}, resume='{{}}')"
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


def _checked_levels(levels: Sequence[str]) -> list[str]:
    names = list(levels.split(",") if isinstance(levels, str) else levels)
    if not names or any(name not in LEVELS for name in names):
        raise ValueError(
            f"levels must be some of {', '.join(LEVELS)}; got {names}; call "
            "amp_patch.sweep(train, levels=['O0', 'O1'])."
        )
    return list(dict.fromkeys(names))


def _refuse_numbers(**options: Any) -> None:
    """Check the numbers as the command line checks its own.

    Raises:
        ValueError: one is out of range, or no number.
    """
    kind: Any
    for name, least, kind in (
        ("steps", 1, numbers.Integral),
        ("repeat", 1, numbers.Integral),
        ("seed", 0, numbers.Integral),
        ("timeout", 0, numbers.Real),
    ):
        value = options.get(name)
        if value is None and name in ("steps", "timeout"):
            continue
        in_range = isinstance(value, kind) and least <= value < math.inf
        if name == "timeout" and (not in_range or value == 0):
            raise ValueError(
                f"timeout must be seconds above 0, or None for no limit; got {value!r}; "
                "call amp_patch.sweep(train, timeout=600)."
            )
        if not in_range:
            whole = "a whole number of at" if kind is numbers.Integral else "a number of at"
            raise ValueError(
                f"{name} must be {whole} least {least}; got {value!r}; call "
                f"amp_patch.sweep(train, {name}={least or 1})."
            )


def _refuse_share(tolerance: Any) -> None:
    """Check the tolerance, of which 5 would be 500%.

    Raises:
        ValueError: it is no share.
    """
    if not (isinstance(tolerance, numbers.Real) and 0 <= float(tolerance) < 1):
        raise ValueError(
            "tolerance must be a share of the loss, a number from 0 to below 1; got "
            f"{tolerance!r}; call amp_patch.sweep(train, tolerance=0.05) for 5%."
        )


def _name_of(train_fn: Any) -> str:
    function = getattr(train_fn, "func", train_fn)  # of functools.partial
    return str(getattr(function, "__qualname__", type(function).__name__))


if __name__ == "__main__":
    call(sys.argv[1])
