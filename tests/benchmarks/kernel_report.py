"""Shows and keeps what the benchmark of the kernels measured, and says what missed its target."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

COLUMNS = ("operation", "MB", "ms", "host ms", "GB/s", "of the copy", "launches")


@dataclass(frozen=True)
class Measured:
    """One operation on one list of tensors."""

    operation: str
    megabytes: float
    milliseconds: float
    host_milliseconds: float
    share_of_copy: float
    launches: int

    def cells(self) -> tuple[str, ...]:
        """Return the row as COLUMNS names it."""
        bandwidth = self.megabytes / self.milliseconds
        return (
            self.operation,
            f"{self.megabytes:.1f}",
            f"{self.milliseconds:.3f}",
            f"{self.host_milliseconds:.3f}",
            f"{bandwidth:.0f}",
            f"{self.share_of_copy:.0%}",
            str(self.launches),
        )


def as_table(rows: Sequence[Measured]) -> str:
    """Return rows as text, the names of the operations to the left, numbers to the right."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  " + "  ".join(cells) for cells in padded)


def below_share(rows: Sequence[Measured], least: Mapping[str, float]) -> list[str]:
    """Name what reaches a smaller share of the copy's bandwidth than it must."""
    return [
        f"{row.operation}: {row.share_of_copy:.0%} of the copy, must be {least[row.operation]:.0%}"
        for row in rows
        if row.share_of_copy < least.get(row.operation, 0.0)
    ]


def not_faster(rows: Sequence[Measured], ours: str, rivals: Mapping[str, float]) -> list[str]:
    """Name the rivals that ours is not as many times faster than as it must be."""
    times = {row.operation: row.milliseconds for row in rows}
    return [
        f"{ours}: {times[rival] / times[ours]:.2f} times as fast as {rival}, must be {factor}"
        for rival, factor in rivals.items()
        if times[rival] < factor * times[ours]
    ]


def machine(device: torch.device) -> dict[str, str]:
    """Describe the machine by its kind, and the versions."""
    about = {
        "device": "CPU",
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device.type == "cuda":
        about |= {"device": torch.cuda.get_device_name(device), "driver": _driver()}
        about |= {"CUDA": str(torch.version.cuda), "cupy": _cupy()}
    return about


def _cupy() -> str:
    try:
        import cupy
    except ImportError:
        return "missing"
    return str(cupy.__version__)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save(
    folder: Path,
    about: Mapping[str, str],
    measured: Mapping[str, Sequence[Measured]],
    missed: Sequence[str],
) -> Path:
    """Write what was measured so far.

    Args:
        folder: where; made if it is not there.
        about: the machine.
        measured: rows, by the name of their list of tensors.
        missed: the targets that were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{about['device'].replace(' ', '-')}.json"
    lists = {name: [asdict(row) for row in rows] for name, rows in measured.items()}
    text = json.dumps({"machine": about, "missed": list(missed), "lists": lists}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    return path
