"""Why a script ended, in one line; knows exit codes and what scripts and launchers print."""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
# Launchers put the rank in front: "[rank0]: ValueError: ..."
_RANK = r"^(?:\[[^\]]*\]:?\s*)?"
_ERROR = re.compile(_RANK + r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
#: What amp_patch adds to errors of torch's (`dtype_notes`): where it was, and the mend.
_NOTE = re.compile(_RANK + r"(amp_patch: .*)")
_PLACE = re.compile(_RANK + r'File "(.+)", line (\d+)')
#: Where no script of the user's is: Python and its packages, programs such as torchrun, amp_patch.
_OTHERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib", "scripts")]
_OTHERS.append(Path(__file__).parents[1])
#: Errors that are at the last place which is told, whosever that is.
_OF_SYNTAX = ("SyntaxError:", "IndentationError:", "TabError:")
_TRACEBACK = "Traceback (most recent call last):"
#: The rank, and what Python puts before the lines of an ExceptionGroup: "  | ValueError: ..."
_PREFIX = re.compile(r"^(?:\[[^\]]*\]:? ?)?(?: *\| )?")
#: Added to what ``input()`` and debuggers raise in a script that is run by a command.
_NO_KEYBOARD = "; a script that is run by amp-patch cannot ask: give it the answer as an argument"
#: What Python ends with for an exception that nobody caught, and argparse and click for arguments.
_OF_EXCEPTIONS, _OF_ARGUMENTS = 1, 2
_OF_LAUNCHERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
#: An error of amp_patch ends with the call that mends it, which must not be cut off.
_MOST = 600
_LAST_LINES = 20


def crash_reason(code: int, log: Path) -> str:
    """Return the error that a script ended with, in one line; else its exit code and last line."""
    if code < 0:
        return f"ended by {_signal(-code)}"
    raw = log.read_text("utf-8", "replace").splitlines()
    lines = [line for line in map(plain, raw) if line]
    if not lines:
        return f"exit code {code}, and nothing was printed"
    own = [error for error in _errors(raw) if not any(one in error for one in _OF_LAUNCHERS)]
    if code == _OF_EXCEPTIONS and own:
        return shortened(own[-1] + _NO_KEYBOARD * own[-1].startswith("EOFError"))
    if code == _OF_ARGUMENTS:
        return shortened(lines[-1])
    return shortened(f"exit code {code}, and the last line was: {lines[-1]}")


def last_lines(log: Path) -> str:
    """Return what a script printed last, with the whole of a short traceback."""
    lines = [_ESCAPES.sub("", line) for line in log.read_text("utf-8", "replace").splitlines()]
    return "\n".join(lines[-_LAST_LINES:])


def _errors(raw: Sequence[str]) -> list[str]:
    """Return the errors that were printed, each with its place and amp_patch's note to it.

    The place is the innermost line of the user's own. Where there are tracebacks, the errors are
    what stands below them: a script may print others, which it caught, and its own may have any
    name.
    """
    has_tracebacks = any(_TRACEBACK in line for line in raw)
    found: list[str] = []
    is_in_frames = False
    last = own = ""
    for one in raw:
        line = plain(one)
        if match := _PLACE.match(line):
            last = f" ({_from_here(match[1])}, line {match[2]})"
            own = last if _is_the_users(match[1]) else own
        if _TRACEBACK in line:
            is_in_frames, own = True, ""
        elif is_in_frames:
            if _PREFIX.sub("", _ESCAPES.sub("", one))[:1].strip():  # frames are indented
                is_in_frames = False
                line = _PREFIX.sub("", line)
                found.append(line + (last if line.startswith(_OF_SYNTAX) else own))
        elif not has_tracebacks and (match := _ERROR.match(line)):
            found.append(match[1] + last * match[1].startswith(_OF_SYNTAX))
        elif found and (match := _NOTE.match(line)) and match[1] not in found[-1]:
            found[-1] += f"; {match[1]}"
    return found


def _is_the_users(file: str) -> bool:
    """Return whether a line of a traceback is of the user's own code."""
    return not file.startswith("<") and not any(Path(file).is_relative_to(one) for one in _OTHERS)


def _from_here(file: str) -> str:
    """Return a path as it is from this folder, if it is in it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def plain(line: str) -> str:
    """Return a line without colours, and without what is no character."""
    text = _ESCAPES.sub("", line)
    return "".join(one for one in text if one.isprintable() and one != "\ufffd").strip()


def shortened(line: str) -> str:
    """Return the start of a line that is too long to show."""
    return line if len(line) <= _MOST else line[: _MOST - 3] + "..."


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
