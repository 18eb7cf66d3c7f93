"""Keeps the rows of one machine in a file, which is whole at any time, and says what they lack."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernel_report import machine
from benchmarks.whole_step import report as step_report
from benchmarks.whole_step.candidates import MAX_NORM
from benchmarks.whole_step.row import Key, Row

PACKAGES = ("torchvision", "transformers", "torch_geometric")


def about(device: torch.device, tiny: bool, steps: int) -> dict[str, Any]:
    """Return the machine by its kind, the versions, and what holds for each row of a file."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        **machine(device),
        **versions,
        "kernels": os.environ.get("AMP_PATCH_KERNELS", "chosen by amp_patch"),
        "tiny": tiny,
        "steps until the loss": steps,
        "clipped to the norm": MAX_NORM,
        "TF32": "off, but for the candidate of that name",
        "compiled": "the model, by the backend " + ("eager" if tiny else "inductor"),
    }


@dataclass
class Results:
    """What was measured, and what was not.

    Attributes:
        path: of the JSON; the table is beside it. None: nothing is written.
        about: see `about`.
        rows: those that are there, errors among them.
        missing: what is not there -> why.
        targets: a line for each.
    """

    path: Path | None
    about: dict[str, Any]
    rows: dict[Key, Row] = field(default_factory=dict)
    missing: dict[Key, str] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what a file has."""
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row.from_json(row) for row in found["rows"]]
        missing = {
            Key(one["mode"], one["model"], candidate): one["why"]
            for one in found["not measured"]
            for candidate in one["candidates"]
        }
        return cls(path, found["about"], {row.key: row for row in rows}, missing, found["targets"])

    def add(self, row: Row) -> None:
        """Take a row in, and write all that is there."""
        self.rows[row.key] = row
        self.missing.pop(row.key, None)
        self.write()

    def write(self) -> None:
        """Write the JSON, and the table beside it."""
        self.targets = [] if self.about["tiny"] else step_report.target_lines(self.rows)
        if self.path is None:
            return
        missing = [
            {"why": why, "mode": mode, "model": model, "candidates": candidates}
            for (why, mode, model), candidates in step_report.grouped(self.missing).items()
        ]
        found = {
            "about": self.about,
            "rows": [row.as_json() for row in self.rows.values()],
            "not measured": missing,
            "targets": self.targets,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _write(self.path, json.dumps(found, indent=2, allow_nan=False) + "\n")
        _write(self.path.with_suffix(".md"), self.as_text())

    def as_text(self) -> str:
        """Return all of it as Markdown."""
        return step_report.as_text(self.about, self.rows, self.missing, self.targets)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def file_name(about: Mapping[str, Any]) -> str:
    """Return the name of a machine's file."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", about["device"]).strip("-")
    return f"step-{device}.json"


def differences(ones: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Say in what two machines, or what was done there, differ; not by the date."""
    names = [name for name in {**ones, **others} if name != "date"]
    return [
        f"{name} {ones.get(name)} and {others.get(name)}"
        for name in names
        if ones.get(name) != others.get(name)
    ]
