"""Whether a level trains as fp32 does: one verdict for each run, one for a level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from amp_patch.tools.recorded import is_spoiled
from amp_patch.tools.shares import share

from .outcomes import NO_STEPS, Run
from .steps import Step

OK, DEVIATES, DIVERGED = "ok", "deviates", "diverged"
NO_LOSS, NOT_COMPARED = "no loss", "not compared"
#: What levels are compared with.
REFERENCE = "O0"
#: So many skipped steps in a row, until the end, are not the search for a scale any more: 25
#: halvings bring the first scale of 65536 below 2e-3.
STUCK = 25
#: Of a loss that ends above so many times what it was at first, or so many times 1 where that is
#: more, nothing is left to compare.
BLOWN_UP = 1e4
#: The verdict of a level is the worst of its rounds'; words that are not here are worse.
_FROM_THE_BEST = (OK, NOT_COMPARED, NO_LOSS, DEVIATES)


@dataclass(frozen=True)
class Verdict:
    """What is to be thought of a level.

    Attributes:
        kind: a word of this module or of `outcomes`.
        at_step: where it diverged, or how far it came, from 1; None where that says nothing.
        reason: a sentence without its full stop; empty where the kind says all.
    """

    kind: str
    reason: str = ""
    at_step: int | None = None

    @property
    def short(self) -> str:
        """A few words for a table."""
        return f"{self.kind} at step {self.at_step}" if self.at_step is not None else self.kind


def verdict_of(runs: Sequence[Run], references: Sequence[Run], tolerance: float) -> Verdict:
    """Return the verdict on a level.

    Args:
        runs: of the level, one a round.
        references: of O0, as many; empty where it was not swept.
        tolerance: how far the final loss may be from the reference's, see `deviations`.
    """
    single = [_of_run(run) for run in runs]
    worst = max(single, key=lambda verdict: _badness(verdict.kind))
    if worst.kind != OK or runs[0].level == REFERENCE:
        return worst
    if not references:
        return Verdict(NOT_COMPARED, f"{REFERENCE} was not swept, so nothing to compare it with")
    if any(_of_run(run).kind != OK for run in references):
        return Verdict(NOT_COMPARED, f"{REFERENCE} did not train, so nothing to compare it with")
    spoiled = [title for run in runs for title in run.spoiled]
    if spoiled and not any(run.spoiled for run in references):  # else half is not why
        return Verdict(DEVIATES, is_spoiled(spoiled[0]))
    return _compared(deviations(runs, references), tolerance)


def deviations(runs: Sequence[Run], references: Iterable[Run]) -> list[float]:
    """Return how far the final loss is from the reference's, as a share of it, round by round.

    Of a reference near 0, as a share of a twentieth of what it fell by, see `share`.
    """
    by_round = {run.round: run for run in references}
    pairs = [(run.final_loss, by_round.get(run.round)) for run in runs]
    return [
        share(loss, other.final_loss, other.losses)
        for loss, other in pairs
        if loss is not None and other is not None and other.final_loss is not None
    ]


def divergence(steps: Sequence[Step]) -> Verdict | None:
    """Return where training came to nothing, and how; None where it did not.

    It did where from some step to the end the loss is inf or NaN, or `BLOWN_UP` times what it was,
    or all steps are skipped. Where a script trains several times, the first training that came to
    nothing counts.
    """
    made = 0
    for _, group in itertools.groupby(steps, key=lambda step: step.training):
        training = list(group)
        made += len(training)
        found = _divergence(training)
        if found is not None:
            count, words = found
            words += ", to the end of that training" if made < len(steps) else ""
            return Verdict(DIVERGED, words, made - count + 1)
    return None


def _divergence(steps: Sequence[Step]) -> tuple[int, str] | None:
    """Return how many steps at the end of a training came to nothing, and how; None for none."""
    bad = _trailing(not step.is_finite for step in steps)
    if bad:
        kinds = {"NaN" if math.isnan(step.loss or 0.0) else "inf" for step in steps[-bad:]}
        return bad, f"from then on the loss is {' or '.join(sorted(kinds))}"
    losses = [abs(step.loss or 0.0) for step in steps]
    first = [loss for loss in losses if loss and math.isfinite(loss)][:2]
    bound = BLOWN_UP * max([1.0, *first])
    large = _trailing(loss > bound for loss in losses)
    if large:
        return large, f"from then on the loss is more than {BLOWN_UP:,.0f} times what it was"
    skipped = _trailing(step.skipped for step in steps)
    if skipped >= STUCK:
        words = f"from then on every step is skipped, {skipped} of them"
        if steps[-1].uncleared:
            words += (
                ", for the gradients of a skipped step are not cleared: call optimizer.zero_grad() "
                "between steps"
            )
        return skipped, words
    return None


def _of_run(run: Run) -> Verdict:
    """Return the verdict on one run, compared with nothing."""
    diverged = divergence(run.steps)
    if diverged is not None:
        return diverged if run.is_finished else _and_then(diverged, run)
    if not run.is_finished:
        reason, step = run.outcome.reason, len(run.steps) or None
        return Verdict(run.outcome.kind, reason, None if run.outcome.kind == NO_STEPS else step)
    if all(step.skipped for step in run.steps):
        count = len(run.steps)
        reason = f"all {count} steps were skipped while the loss scale fell; sweep more --steps"
        return Verdict(NO_STEPS, reason)
    if not run.losses:
        return Verdict(NO_LOSS, "no loss was passed to amp.scale_loss, so nothing to compare")
    return Verdict(OK)


def _and_then(diverged: Verdict, run: Run) -> Verdict:
    """Return a verdict with how the run ended, which may be another matter."""
    end = f"{run.outcome.kind} at step {len(run.steps)}"
    why = f": {run.outcome.reason}" if run.outcome.reason else ""
    return replace(diverged, reason=f"{diverged.reason}; {end}{why}")


def _compared(deviations: Sequence[float], tolerance: float) -> Verdict:
    mean = sum(deviations) / len(deviations)
    if abs(mean) <= tolerance:
        return Verdict(OK)
    words = f"its final loss is {mean:+.1%} from {REFERENCE}'s, the tolerance is {tolerance:.1%}"
    return Verdict(DEVIATES, words)


def _badness(kind: str) -> int:
    return _FROM_THE_BEST.index(kind) if kind in _FROM_THE_BEST else len(_FROM_THE_BEST)


def _trailing(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        count = count + 1 if flag else 0
    return count
