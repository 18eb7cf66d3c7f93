"""What was initialized since the session began, and how many steps came of it.

Knows numbers and names only, so it stays when models and optimizers go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from amp_patch.kernels import HostCopy


class StepCount:
    """The steps of one optimizer.

    Attributes:
        steps: how many there were, skipped ones included.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._skipped = 0
        self._late: deque[HostCopy] = deque()

    def add_skipped(self) -> None:
        """A step was skipped."""
        self.steps += 1
        self._skipped += 1

    def add_late(self, outcome: HostCopy) -> None:
        """A step was skipped if a number that is on its way from its device is not 0."""
        self.steps += 1
        self._late.append(outcome)
        while self._late and self._late[0].ready():
            self._take_in()

    @property
    def skipped(self) -> int:
        """How many of them were skipped. May wait for a device."""
        while self._late:
            self._take_in()
        return self._skipped

    def _take_in(self) -> None:
        flag: Any = self._late.popleft().wait().tolist()
        self._skipped += flag != 0


class Prepared(NamedTuple):
    """An optimizer that was initialized; it may be gone.

    Attributes:
        optimizer: the name of its class.
        level: "O2".
        scalers: loss_id -> the number of the loss scaler.
        made: its steps.
    """

    optimizer: str
    level: str
    scalers: Mapping[int, int]
    made: StepCount


class History:
    """All of a session.

    Attributes:
        since: when its first `amp.initialize` was called; None before.
        levels: the names of the levels, in the order in which they came.
        optimizers: in the order in which they came.
    """

    def __init__(self) -> None:
        self.since: datetime | None = None
        self.levels: list[str] = []
        self.optimizers: list[Prepared] = []

    def add(self, level: str, optimizers: Iterable[Prepared] = ()) -> None:
        """An `amp.initialize` at a level is over."""
        self.since = self.since or datetime.now().astimezone()
        if level not in self.levels:
            self.levels.append(level)
        self.optimizers += optimizers
