"""Why a script ended, in one line; knows exit codes and what scripts and launchers print."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
# Launchers put the rank in front: "[rank0]: ValueError: ..."
_RANK = r"^(?:\[[^\]]*\]:?\s*)?"
_ERROR = re.compile(_RANK + r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)")
#: What amp_patch adds to errors of torch's (`dtype_notes`): where it was, and the mend.
_NOTE = re.compile(_RANK + r"(amp_patch: .*)")
_OF_LAUNCHERS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException")
#: An error of amp_patch ends with the call that mends it, which must not be cut off.
_MOST = 600


def crash_reason(code: int, log: Path) -> str:
    """Return the error that a script ended with, in one line."""
    lines = [plain(line) for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    own = [error for error in _errors(lines) if not any(name in error for name in _OF_LAUNCHERS)]
    if code < 0:
        return f"ended by {_signal(-code)}"
    if own:
        return shortened(own[-1])
    return shortened(lines[-1]) if lines else f"exit code {code}, and nothing was printed"


def _errors(lines: Sequence[str]) -> list[str]:
    """Return the errors that were printed, each with amp_patch's note to it."""
    found: list[str] = []
    for line in lines:
        if match := _ERROR.match(line):
            found.append(match[1])
        elif found and (match := _NOTE.match(line)) and match[1] not in found[-1]:
            found[-1] += f"; {match[1]}"
    return found


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
