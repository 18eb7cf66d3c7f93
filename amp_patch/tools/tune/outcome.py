"""What one run says of a setting: the metric, or why it cannot be used; and how far it is off.

Pure functions over recorded steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_patch.tools.shares import share

#: The share of a run's second half that may be skipped; in the first the loss scale settles.
SKIPPED = 0.1
#: Characters of an error that are told.
WORDS = 100
NO_LOSS = (
    "no loss was given to amp.scale_loss; name another metric, a number that the script prints: "
    "--metric 'accuracy: ([0-9.]+)'"
)


@dataclass(frozen=True)
class Outcome:
    """The metric of one run.

    Attributes:
        values: of the loss one for each optimizer, else one; empty where it failed.
        losses: all of them, for each of the values; of another metric empty.
        failure: why it cannot be used, in words, all of them; None where it can.
    """

    values: tuple[float, ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    failure: str | None = None

    def deviation(self, reference: Outcome) -> float:
        """Return the largest relative difference from the reference; inf where one failed."""
        if self.failure or reference.failure or len(self.values) != len(reference.values):
            return math.inf
        losses = reference.losses or [()] * len(reference.values)
        rows = zip(self.values, reference.values, losses, strict=True)
        return max(abs(share(*row)) for row in rows)

    def words(self) -> str:
        """Return the values, or the failure in a line."""
        if self.failure:
            return shortened(self.failure)
        return ", ".join(f"{value:.5g}" for value in self.values)


def over_ranks(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the steps of several processes as one's.

    A loss is the mean over them; a step is skipped where any of them has skipped it.

    Args:
        ranks: for each the lines of `recorder.Losses`.
    """
    together = []
    for row in zip(*ranks, strict=False):
        losses = [one["loss"] for one in row if one["loss"] is not None]
        loss = sum(losses) / len(losses) if losses else None
        skipped = any(one["skipped"] for one in row)
        together.append({"optimizer": row[0]["optimizer"], "loss": loss, "skipped": skipped})
    return together


def outcome_of_losses(steps: Sequence[Mapping[str, Any]], error: str | None) -> Outcome:
    """Return the mean loss of the last tenth of a run's steps.

    Args:
        steps: the lines of `recorder.Losses`.
        error: why the run failed; None where it did not.
    """
    if error is not None:
        return Outcome(failure=error)
    half = steps[len(steps) // 2 :]
    skipped = sum(bool(step["skipped"]) for step in half)
    by_optimizer = [_losses_of(steps, number) for number in sorted({s["optimizer"] for s in steps})]
    trained = [losses for losses in by_optimizer if losses]
    means = [_last_tenth(losses) for losses in trained]
    if not means:
        return Outcome(failure=NO_LOSS)
    if not all(map(math.isfinite, means)):
        return Outcome(failure="the loss is not finite")
    if skipped > max(1, SKIPPED * len(half)):
        return Outcome(failure=f"{skipped} of the last {len(half)} steps were skipped")
    return Outcome(tuple(means), tuple(map(tuple, trained)))


def outcome_of_output(text: str, pattern: re.Pattern[str], error: str | None) -> Outcome:
    """Return the last number that a script printed where a pattern says.

    Args:
        text: what it printed.
        pattern: its first group, or all of it, is the number.
        error: why the run failed; None where it did not.
    """
    if error is not None:
        return Outcome(failure=error)
    all_found = (match[1] if pattern.groups else match[0] for match in pattern.finditer(text))
    found = [one for one in all_found if one is not None]  # as where a group may be missing
    if not found:
        return Outcome(failure=f"it printed nothing that matches {pattern.pattern!r}")
    try:
        value = float(found[-1])
    except ValueError:
        return Outcome(failure=f"{pattern.pattern!r} matches {found[-1]!r}, which is no number")
    return Outcome((value,)) if math.isfinite(value) else Outcome(failure="it is not finite")


def shortened(error: str) -> str:
    """Return the beginning of an error's message, up to where it lists or advises."""
    return error if len(error) <= WORDS else f"{error[:WORDS].rsplit(' ', 1)[0]} ..."


def progress(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return by which share of itself the loss changed from the first tenth to the last."""
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    tenth = max(1, len(losses) // 10)
    if not losses:
        return 0.0
    return abs(share(_last_tenth(losses), sum(losses[:tenth]) / tenth))


def _losses_of(steps: Sequence[Mapping[str, Any]], optimizer: int) -> list[float]:
    return [s["loss"] for s in steps if s["optimizer"] == optimizer and s["loss"] is not None]


def _last_tenth(losses: Sequence[float]) -> float:
    tenth = losses[-max(1, len(losses) // 10) :]
    return sum(tenth) / len(tenth)
