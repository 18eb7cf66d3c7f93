"""Reads what a tool writes in the script's process, line by line; see `child.Lines`.

Imports no torch: commands read what others recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of `child.Lines`; a line that is being written is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
