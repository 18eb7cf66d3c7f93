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
#: The most steps that a loss scale of 2**16 is halved at, until it is 1.
_SETTLES = 16
#: Characters of an error that are told.
WORDS = 100
NO_LOSS = (
    "no loss was given to amp.scale_loss; name another metric, a number that the script prints: "
    r"--metric 'accuracy: ([-+.\d]+|nan)'"
)
#: A number as Python prints it; the hyphen of "top-5" and of "3-5" is no sign.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Outcome:
    """The metric of one run.

    Attributes:
        values: of the loss one for each optimizer, else one; empty where it failed.
        losses: all of them, for each of the values; of another metric empty.
        skipped: how many steps were, for each of the values; of another metric empty.
        failure: why it cannot be used, in words, all of them; None where it can.
    """

    values: tuple[float, ...] = ()
    losses: tuple[tuple[float, ...], ...] = ()
    skipped: tuple[int, ...] = ()
    failure: str | None = None

    def deviation(self, reference: Outcome) -> float:
        """Return the largest relative difference from the reference; inf where one failed.

        A run whose loss scale had to settle has learned from fewer steps: its loss may as well be
        near that of the reference up to so many steps before.
        """
        if self.failure or reference.failure or len(self.values) != len(reference.values):
            return math.inf
        losses = reference.losses or ((),) * len(self.values)
        skipped = self.skipped or (0,) * len(self.values)
        rows = zip(self.values, reference.values, losses, skipped, strict=True)
        return max(_deviation(*row) for row in rows)

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
    numbers = sorted({step["optimizer"] for step in steps if step["loss"] is not None})
    trained = [_losses_of(steps, number) for number in numbers]
    means = [_last_tenth(losses) for losses in trained]
    if not means:
        return Outcome(failure=NO_LOSS)
    if not all(map(math.isfinite, means)):
        return Outcome(failure="the loss is not finite")
    if skipped > max(1, SKIPPED * len(half)):
        return Outcome(failure=f"{skipped} of the last {len(half)} steps were skipped")
    skips = [sum(s["skipped"] for s in steps if s["optimizer"] == number) for number in numbers]
    return Outcome(tuple(means), tuple(map(tuple, trained)), tuple(skips))


def outcome_of_output(text: str, pattern: re.Pattern[str], error: str | None) -> Outcome:
    """Return the last number that a script printed where a pattern says.

    Args:
        text: what it printed.
        pattern: its first group, or all of it, is the number, or a part of it: where the text goes
            on with digits, a fraction or an exponent, or a sign stands before, so does the number.
        error: why the run failed; None where it did not.
    """
    if error is not None:
        return Outcome(failure=error)
    group = 1 if pattern.groups else 0
    # a group may be missing
    found = [match for match in pattern.finditer(text) if match[group] is not None]
    if not found:
        return Outcome(failure=f"it printed nothing that matches {pattern.pattern!r}")
    number = _whole_number(found[-1], group)
    try:
        value = float(number)
    except ValueError:
        return Outcome(failure=f"{pattern.pattern!r} matches {number!r}, which is no number")
    return Outcome((value,)) if math.isfinite(value) else Outcome(failure="it is not finite")


def _whole_number(match: re.Match[str], group: int) -> str:
    """Return what a group matches, with the rest of the number, if the match ends amid one.

    ``[0-9.]+`` matches 9.8 of 9.8e-05. What the pattern itself matches beside the group it leaves
    out on purpose.
    """
    text, (start, end) = match.string, match.span(group)
    for number in _NUMBER.finditer(text, text.rfind("\n", 0, start) + 1):
        if number.start() <= start < end <= number.end():
            first = number.start() if start == match.start() else start
            return text[first : number.end() if end == match.end() else end]
        if number.start() > start:
            break
    return text[start:end]


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


def _deviation(value: float, expected: float, losses: Sequence[float], skipped: int) -> float:
    is_settling = skipped <= _SETTLES and skipped < len(losses) // 2
    lags = range(1, skipped + 1) if is_settling else ()
    near = [expected, *(_last_tenth(losses, lag) for lag in lags)]
    return min(abs(share(value, one, losses)) for one in near)


def _losses_of(steps: Sequence[Mapping[str, Any]], optimizer: int) -> list[float]:
    return [s["loss"] for s in steps if s["optimizer"] == optimizer and s["loss"] is not None]


def _last_tenth(losses: Sequence[float], lag: int = 0) -> float:
    """Return the mean of so many losses, which end a few steps before the last one."""
    end = len(losses) - lag
    tenth = losses[end - max(1, len(losses) // 10) : end]
    return sum(tenth) / len(tenth)
