"""Runs that seem not to have begun as the first run of the sweep did; pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .outcomes import NO_STEPS, Run

#: By so much, as a share, the first loss of a run may differ from that of another from scratch.
ALIKE = 0.1
#: So many standard errors of a loss are no chance.
MANY_ERRORS = 4


def continued(runs: Sequence[Run]) -> list[str]:
    """Return the levels of runs that seem not to have begun from scratch.

    Such a run makes no steps, for none are left, or has the state of an optimizer before its first
    step, which the first run had not, or begins with about the loss that the first has ended with.

    Args:
        runs: in the order in which they were made.
    """
    first = next((run for run in runs if run.is_finished), None)
    if first is None:
        return []
    later = [run for run in runs[runs.index(first) + 1 :] if _goes_on(run, first)]
    return list(dict.fromkeys(run.level for run in later))


def _goes_on(run: Run, first: Run) -> bool:
    if run.outcome.kind == NO_STEPS or (run.resumed and first.resumed is False):
        return True
    end = first.final_loss
    if end is None or not run.losses or not math.isfinite(end + run.losses[0]):
        return False
    loss, start = run.losses[0], first.losses[0]
    least = max(ALIKE * abs(start), MANY_ERRORS * _noise(first.losses))
    return abs(loss - start) > max(least, abs(loss - end))


def _noise(losses: Sequence[float]) -> float:
    """Return the standard error of a single loss, whatever they fall by from step to step."""
    triples = zip(losses, losses[1:], losses[2:], strict=False)
    bends = [abs(before - 2 * loss + after) for before, loss, after in triples]
    finite = [one for one in bends if math.isfinite(one)]
    # of normal numbers: the variance of such a sum is six times theirs
    return statistics.median(finite) / 0.6745 / math.sqrt(6) if finite else 0.0


def begun_otherwise(runs: Sequence[Run], reference: str) -> list[str]:
    """Return the levels whose first loss, before any step, is not that of the reference.

    Args:
        runs: of all levels.
        reference: a level.
    """
    first = {run.round: run.losses[0] for run in runs if run.level == reference and run.losses}
    found = [
        run.level
        for run in runs
        if run.losses
        and math.isfinite(run.losses[0])
        and abs(run.losses[0] - first.get(run.round, run.losses[0])) > ALIKE * abs(run.losses[0])
    ]
    return list(dict.fromkeys(found))
