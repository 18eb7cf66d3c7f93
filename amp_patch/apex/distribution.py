"""What ``importlib.metadata`` is told of apex while the drop-in stands; imports no torch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

#: The version that every apex gave itself.
VERSION = "0.1"


class Apex(importlib.metadata.Distribution):
    """A distribution named apex, without files."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA; None for other files."""
        if filename != "METADATA":
            return None
        summary = "What amp_patch supplies in the place of apex"
        return f"Metadata-Version: 2.1\nName: apex\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: Any) -> Path:
        """Return where a file of the distribution would lie."""
        return Path(__file__).parent / "packages" / str(path)
