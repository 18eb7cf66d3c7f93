"""How a run ended, and its reason in words; knows exit codes and logs, no losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_patch.tools.crash import crash_reason
from amp_patch.tools.untrained import REASONS

from .steps import Recording, Step, final_window

FINISHED, CRASHED = "finished", "crashed"
TIMED_OUT, INTERRUPTED = "timed out", "interrupted"
NOT_RUN, NO_STEPS = "not run", "no steps"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        kind: one of this module's words.
        reason: empty where the kind says all.
    """

    kind: str
    reason: str = ""


def outcome_of(code: int | None, log: Path, recording: Recording | None) -> Outcome:
    """Return how a run ended that nobody stopped.

    Args:
        code: the exit code; None where it was stopped because its steps were made.
        log: what the script printed.
        recording: of the first rank; None where the script never imported amp.
    """
    done = recording is not None and recording.done
    if code not in (0, None) and not done:
        return Outcome(CRASHED, crash_reason(code or 0, log))
    if recording is None or not recording.steps:
        return Outcome(NO_STEPS, REASONS[None if recording is None else recording.initialized])
    return Outcome(FINISHED)


@dataclass
class Run:
    """One run of the script, ended or not begun.

    Attributes:
        level, round: which; rounds are counted from 1.
        outcome: how it ended.
        seconds: how long the process lived.
        steps: of the first rank.
        about: what the process ran in, see `recorder.about`.
        spoiled: buffers that the training has made inf or NaN, see `tools.buffer_looks`.
        unlike_skips: the steps, from 1, that some ranks skipped and others made.
    """

    level: str
    round: int
    outcome: Outcome = field(default_factory=lambda: Outcome(NOT_RUN))
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    spoiled: list[str] = field(default_factory=list)
    unlike_skips: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether the script made its steps and ended by itself."""
        return self.outcome.kind == FINISHED

    @property
    def resumed(self) -> bool | None:
        """Whether an optimizer had the state of steps before the first one; None: not known."""
        resumed: bool | None = self.about.get("resumed")
        return resumed

    @property
    def losses(self) -> list[float]:
        """The losses of the steps that had one."""
        return [step.loss for step in self.steps if step.loss is not None]

    @property
    def final_loss(self) -> float | None:
        """The mean loss of the last tenth of the steps, one at least; None without a loss.

        A loss that is inf or NaN does not count where its step was skipped: nothing learned of it.
        """
        finite = [
            step.loss
            for step in self.steps
            if step.loss is not None and (step.is_finite or not step.skipped)
        ]
        counted = finite or self.losses
        last = final_window(counted) if counted else []
        return sum(last) / len(last) if last else None
