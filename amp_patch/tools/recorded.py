"""Reads what a tool writes in the script's process, line by line; see `child.Lines`.

Imports no torch: commands read what others recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The key of a line that names a buffer which a training has made inf or NaN, see `buffer_looks`:
#: "running_var of `bn` (BatchNorm2d) holds inf, in float16".
SPOILED = "spoiled"


def is_spoiled(title: str) -> str:
    """Return what is wrong with a training that has such a buffer, without a full stop."""
    return f"{title}, and evaluations with it are wrong"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of `child.Lines`; a line that is being written is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
