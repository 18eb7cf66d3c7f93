"""Replaces this process by the user's script, with apex in place there and in its children.

Knows the environment variables that say so; imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_patch.casting.rules import PROFILES

from .finder import is_of_amp_patch
from .unused import SCRIPT

#: Where ``amp-patch run --report`` writes; the process that it became, and when it did.
REPORT = "AMP_PATCH_REPORT"
REPORT_PROCESS = "AMP_PATCH_REPORT_PROCESS"
_STARTUP = str(Path(__file__).parent / "startup")
#: How compiled programs begin, on Linux, Windows and macOS.
_BINARIES = (b"\x7fELF", b"MZ\x90", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


def run_python(
    command: Sequence[str],
    opt_level: str | None,
    force: bool = False,
    rules: str | None = None,
    report: str | None = None,
) -> None:
    """Become ``python COMMAND``, with the options that this Python was started with.

    It is the very interpreter that runs the script, so arguments, paths, tracebacks, signals and
    the exit code are Python's own. Where the first word is a program's, become that.

    Args:
        command: ``["script.py", "arg", ...]``, ``["-m", "module", "arg", ...]`` or
            ``["torchrun", "arg", ...]``, or the path of a program.
        opt_level: takes the place of what the script gives `initialize`; None leaves it.
        force: put the drop-in in the place of a real apex, too.
        rules: a profile, or the path of a rules file, in the place of what the script gives
            `initialize`.
        report: path of the file that tells, in the end, what became of the run.

    Raises:
        RuntimeError: Python was started with -I, -E or -S, which keep the children from finding
            apex.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise RuntimeError(
            "amp-patch run tells Python of apex by PYTHONPATH and site; got a Python started with "
            "-I, -E or -S, which ignores one of them. Run python -m amp_patch run without it."
        )
    first, *rest = command
    program = None if first == "-m" else program_named(first)
    start = [sys.executable, *_options_of_python(), first] if program is None else [program]
    argv = [*start, *rest]
    environment = environment_of_run(os.environ, opt_level, force, rules, report)
    sys.stdout.flush()
    sys.stderr.flush()
    if program is None:
        environment[SCRIPT] = str(os.getpid())  # which exec keeps
    if os.name == "nt":  # where exec starts another process and ends this one at once
        sys.exit(subprocess.call(argv, env=environment))
    os.execve(argv[0], argv, environment)


def program_named(word: str) -> str | None:
    """Return the path of a program, of this environment first (``torchrun``).

    None where there is none, and where Python runs what is at this path.
    """
    if is_for_python(word):
        return None
    if Path(word).is_file():
        return os.path.abspath(word)  # not resolved: a link tells a Python its environment
    beside = Path(sys.executable).parent / word
    return str(beside) if beside.is_file() else shutil.which(word)


def is_for_python(word: str) -> bool:
    """Return whether Python runs what is at a path: a script, or what holds a ``__main__.py``.

    What the system starts by itself is none: a shell script, or another Python.
    """
    path = Path(word)
    if not path.is_file():
        return (path / "__main__.py").is_file()
    if path.suffix.startswith(".py") or not os.access(path, os.X_OK):
        return True
    with path.open("rb") as file:
        first = file.readline(1000)
    return not first.startswith(_BINARIES) and (not first.startswith(b"#!") or b"python" in first)


def real_amp(paths: Sequence[str] | None = None) -> str | None:
    """Return where an apex lies that has ``apex.amp`` itself; None where there is none.

    Args:
        paths: to look in; None: in ``sys.path``.
    """
    finders = [one for one in sys.meta_path if not is_of_amp_patch(one)]
    found = (one.find_spec("apex", paths) for one in finders)
    spec = next(filter(None, found), None)
    places = [] if spec is None or spec.loader is None else spec.submodule_search_locations or []
    return next((place for place in places if Path(place, "amp", "__init__.py").is_file()), None)


def environment_of_run(
    environment: Mapping[str, str],
    opt_level: str | None,
    force: bool = False,
    rules: str | None = None,
    report: str | None = None,
) -> dict[str, str]:
    """Return the environment in which Python installs the drop-in when it starts.

    Args:
        environment: what there is now.
        opt_level, force, rules, report: as `run_python`.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if path != _STARTUP]
    changed = {
        "PYTHONPATH": os.pathsep.join([_STARTUP, *others]),
        # Pythons of other environments may be among the children.
        "AMP_PATCH_RUN": sys.prefix,
    }
    if opt_level is not None:
        changed["AMP_PATCH_OPT_LEVEL"] = opt_level
    if rules is not None:  # the script may change the folder before it needs a file
        changed["AMP_PATCH_RULES"] = rules if rules in PROFILES else os.path.abspath(rules)
    if report is not None:
        changed[REPORT] = os.path.abspath(report)
        changed[REPORT_PROCESS] = f"{os.getpid()} {time.time()}"
    if force:
        changed["AMP_PATCH_FORCE"] = "1"
    return {**environment, **changed}


def _options_of_python() -> list[str]:
    """Return the options between 'python' and what runs now: a script, or '-m' and a module."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    *options, last = before[:-1] or [""]
    if re.fullmatch("-[a-zA-Z]*m", last):  # -um stands for -u -m
        last = last[:-1].removesuffix("-")
    return [*options, last] if last else options
