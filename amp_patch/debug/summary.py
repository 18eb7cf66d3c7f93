"""`amp.summary()`: levels, steps and loss scales of this process, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from amp_patch.session import session

#: How many optimizers, and how many losses, the words tell of.
_MOST_LINES = 20


class OptimizerSummary(NamedTuple):
    """The steps of one optimizer.

    Attributes:
        optimizer: the name of its class.
        level: that it was initialized at.
        losses: the numbers of its loss scalers, see `LossSummary`.
        steps: how many there were, those skipped included.
        skipped: how many of them were skipped.
    """

    optimizer: str
    level: str
    losses: tuple[int, ...]
    steps: int
    skipped: int

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.losses))
        losses = f"loss {numbers}" if len(self.losses) == 1 else f"losses {numbers}"
        skipped = f"{self.skipped} of them skipped" if self.skipped else "none skipped"
        return (
            f"{self.optimizer} at {self.level}: {_counted(self.steps, 'step')}, {skipped}; {losses}"
        )


class LossSummary(NamedTuple):
    """A loss scaler.

    Attributes:
        number: its position in this process, what `amp.loss_scale` takes.
        scale: the factor of the next loss.
        is_dynamic: whether the scale moves.
        overflows: backward passes whose gradients were not finite.
    """

    number: int
    scale: float
    is_dynamic: bool
    overflows: int

    def __str__(self) -> str:
        kind = "dynamic" if self.is_dynamic else "static"
        overflows = _counted(self.overflows, "overflow")
        return f"loss {self.number}: scale {self.scale:g}, {kind}; {overflows}"


def _last(several: Sequence[object], what: str) -> list[str]:
    """Return a line for each of the last ones: of many folds, say, each has an optimizer."""
    earlier = len(several) - _MOST_LINES
    first = [f"{earlier} earlier: see amp.summary().{what}"] if earlier > 0 else []
    return [*first, *map(str, several[-_MOST_LINES:])]


class Summary(NamedTuple):
    """What `amp.initialize` has set up, and what came of it since.

    Attributes:
        levels: in the order in which they came; empty where amp is disabled.
        since: when `amp.initialize` was first called, local time; None where amp is disabled.
        optimizers: in the order in which they came, also those that are gone.
        losses: the loss scalers.
    """

    levels: Sequence[str]
    since: datetime | None
    optimizers: Sequence[OptimizerSummary]
    losses: Sequence[LossSummary]

    @property
    def steps(self) -> int:
        """The steps of all optimizers, those skipped included."""
        return sum(one.steps for one in self.optimizers)

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        return sum(one.skipped for one in self.optimizers)

    def __repr__(self) -> str:
        if self.since is None:
            return "amp is disabled (enabled=False): nothing is cast, scaled or counted."
        head = f"amp at {', '.join(self.levels)} since {self.since:%Y-%m-%d %H:%M:%S}"
        optimizers = _last(self.optimizers, "optimizers")
        return "\n  ".join([head, *optimizers, *_last(self.losses, "losses")])

    def to_json(self) -> dict[str, Any]:
        """Return all of it as what JSON can hold."""
        return {
            "levels": list(self.levels),
            "since": None if self.since is None else self.since.isoformat(timespec="seconds"),
            "steps": self.steps,
            "skipped": self.skipped,
            "optimizers": [
                {**one._asdict(), "losses": list(one.losses)} for one in self.optimizers
            ],
            "losses": [one._asdict() for one in self.losses],
        }


def summary() -> Summary:
    """Return the levels, optimizers and losses of this process, with steps, skips and loss scales.

    ``print(amp.summary())`` says it in a few lines. It counts from `amp.initialize` to
    `amp.deactivate`, over all calls of `initialize` between. May wait for a device.

    Raises:
        RuntimeError: `amp.initialize` was not called.
    """
    if session.lookup.is_off("amp.summary()"):
        return Summary((), None, (), ())
    session.optimizers.settle()
    session.settle()
    history = session.history
    return Summary(
        tuple(history.levels),
        history.since,
        tuple(
            OptimizerSummary(
                one.optimizer,
                one.level,
                tuple(dict.fromkeys(one.scalers.values())),
                one.made.steps,
                one.made.skipped,
            )
            for one in history.optimizers
        ),
        tuple(
            LossSummary(
                number,
                scaler.loss_scale(),
                scaler.rule.dynamic,
                session.passes.overflows.count(number),
            )
            for number, scaler in enumerate(session.scalers)
        ),
    )


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
