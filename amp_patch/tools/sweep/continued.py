"""Runs that seem to go on from what an earlier run of the sweep has saved; pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .outcomes import NO_STEPS, Run

#: By so much, as a share, the first loss of a run may differ from that of another from scratch.
ALIKE = 0.1


def continued(runs: Sequence[Run]) -> list[str]:
    """Return the levels of runs that seem not to have begun from scratch.

    Such a run makes no steps, for none are left, or begins with about the loss that the first run
    has ended with.

    Args:
        runs: in the order in which they were made.
    """
    first = next((run for run in runs if run.is_finished), None)
    if first is None:
        return []
    later = [run for run in runs[runs.index(first) + 1 :] if _goes_on(run, first)]
    return list(dict.fromkeys(run.level for run in later))


def _goes_on(run: Run, first: Run) -> bool:
    if run.outcome.kind == NO_STEPS:
        return True
    end = first.final_loss
    if end is None or not run.losses or not math.isfinite(end + run.losses[0]):
        return False
    loss, start = run.losses[0], first.losses[0]
    return abs(loss - start) > max(ALIKE * abs(start), abs(loss - end))
