"""What is recorded of one training step, as lines of a file; imports no torch.

The recorder writes such lines in the script's process, and the command reads them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from amp_patch.tools.recorded import SPOILED

#: The name of the files, before the rank.
NAME = "steps"


@dataclass
class Step:
    """One round of the optimizers.

    Attributes:
        seconds: from the end of the step before it, without what recording took.
        losses: what was passed to ``scale_loss``, one number for each loss: its mean over passes.
        scales: number of a loss scaler -> what it multiplied the loss by.
        skipped: whether an optimizer's step was skipped.
        uncleared: whether it was for gradients of a skipped step that were not cleared.
        overflows: names of parameters whose gradients were inf or NaN, with which it was;
            at most 50.
        norm: 2-norm of the gradients before clipping, where the script clips them.
        memory: most bytes allocated on the CUDA device so far; None without.
        rss: most bytes of the process's memory in RAM so far.
        tensors: most bytes of living tensors in this step; None where they were not counted.
        counted: tensors were counted for a part of the step at least, so it was slower.
        training: from 0; another begins where `amp.initialize` is called after steps were made.
    """

    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)
    skipped: bool = False
    uncleared: bool = False
    overflows: list[list[str]] = field(default_factory=list)
    norm: float | None = None
    memory: int | None = None
    rss: int | None = None
    tensors: int | None = None
    counted: bool = False
    training: int = 0

    @property
    def loss(self) -> float | None:
        """The sum of the step's losses; None where none was passed to ``scale_loss``."""
        return sum(self.losses) if self.losses else None

    @property
    def scale(self) -> float | None:
        """The smallest scale of a loss in this step."""
        return min(self.scales.values(), default=None)

    @property
    def is_finite(self) -> bool:
        """Whether the loss is neither inf nor NaN."""
        return self.loss is None or math.isfinite(self.loss)

    def as_line(self) -> dict[str, Any]:
        """Return what JSON can hold; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, [], {})}


_NAMES = {one.name for one in fields(Step)}


@dataclass
class Recording:
    """What one process recorded.

    Attributes:
        about: of the process, see `recorder.about`; empty before its first step.
        steps: closed ones.
        spoiled: buffers that the training has made inf or NaN, see `tools.buffer_looks`.
        done: it made the steps that were asked for, and ended the script.
        ended: it came to the end of its Python.
        initialized: what had become of amp by then: "no", "disabled" or "yes".
    """

    about: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    done: bool = False
    ended: bool = False
    initialized: str = "no"

    @property
    def standing(self) -> tuple[int, float]:
        """What is largest in the process that is shown of several, as of folds in a pool.

        Of those with most steps it is the one with the least first loss, which is the same one at
        every level: which of them came first is chance.
        """
        first = self.steps[0].loss if self.steps else None
        return len(self.steps), -first if first is not None and math.isfinite(first) else -math.inf

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in one line of the file."""
        if "about" in line:
            self.about = line["about"]
        elif SPOILED in line:
            self.spoiled.append(line[SPOILED])
        elif "done" in line:
            self.done = True
        elif "end" in line:
            self.ended, self.initialized = True, line["end"]
        else:
            self.steps.append(Step(**{k: v for k, v in line.items() if k in _NAMES}))


class Reader:
    """Reads a file of lines that grows.

    Attributes:
        recording: what was read so far.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.recording = Recording()

    def read(self) -> Recording:
        """Read what is new, whole lines only."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # cut off, where the disk was full
                self.recording.take(json.loads(line))
        return self.recording


class Folder:
    """The recordings of one run: a file for each process that trained."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._readers: dict[Path, Reader] = {}

    def read(self) -> dict[int, Recording]:
        """Return rank -> recording; of several processes of a rank, one."""
        for path in sorted(self._path.glob(f"{NAME}-rank*.jsonl")):
            self._readers.setdefault(path, Reader(path))
        found: dict[int, Recording] = {}
        for path, reader in self._readers.items():
            rank = int(path.stem.split("-")[1].removeprefix("rank"))
            recording = reader.read()
            if rank not in found or recording.standing > found[rank].standing:
                found[rank] = recording
        return dict(sorted(found.items()))


def first_rank(recordings: Mapping[int, Recording]) -> Recording | None:
    """Return the recording that is shown; None where there is none."""
    return next(iter(recordings.values()), None)


def unlike_skips(recordings: Mapping[int, Recording]) -> list[int]:
    """Return the steps, counted from 1, that some ranks skipped and others made."""
    each = [[step.skipped for step in one.steps] for one in recordings.values() if one.steps]
    return [number for number, row in enumerate(zip(*each, strict=False), 1) if len(set(row)) > 1]


def final_window(values: Sequence[float]) -> Sequence[float]:
    """Return the last tenth, one value at least."""
    return values[-max(1, len(values) // 10) :]
