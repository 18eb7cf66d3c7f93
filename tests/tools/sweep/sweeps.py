"""Made-up runs, whose figures a test can work out by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from amp_patch.tools.sweep.comparison import Comparison, compared
from amp_patch.tools.sweep.outcomes import FINISHED, Outcome, Run
from amp_patch.tools.sweep.steps import Step

INF, NAN = float("inf"), float("nan")
MEBIBYTE = 2**20
#: Steps around a usual time of 1; their quartiles are 0.95, 1 and 1.05.
TIMES = (1.0, 0.95, 1.05, 0.9, 1.1)


def made_run(
    level: str,
    losses: Sequence[float | None] = (2.0, 1.0) * 10,
    *,
    seconds: float = 0.01,
    number: int = 1,
    skipped: Collection[int] = (),
    outcome: str = FINISHED,
    reason: str = "",
    memory: float = 10,
    culprit: str = "fc.weight",
) -> Run:
    """Return a run.

    Args:
        losses: one a step.
        seconds: of a usual step; the first takes ten times as long.
        number: of the round.
        skipped: which steps, from 1.
        memory: MiB.
        culprit: whose gradients were inf in each skipped step.
    """
    steps = []
    for index, loss in enumerate(losses, 1):
        step = Step(seconds * TIMES[index % 5] * (10 if index == 1 else 1))
        step.losses = [] if loss is None else [loss]
        step.scales, step.rss = {"0": 1024.0}, 300 * MEBIBYTE
        step.skipped = index in skipped
        step.overflows = [[culprit, "inf"]] if step.skipped else []
        step.tensors = int(memory * MEBIBYTE) if index == 2 else None
        step.counted = index == 2
        steps.append(step)
    about = {"device": "a processor", "is_cuda": False, "threads": 1, "processes": 1}
    return Run(level, number, Outcome(outcome, reason), 1.0, steps, about)


def eventful() -> list[Run]:
    """Return a sweep in which levels end in different ways."""
    falling = [2.0 * 0.9**step for step in range(40)]
    return [
        made_run("O0", falling),
        made_run("O1", [1.001 * loss for loss in falling], seconds=0.005, skipped={3, 4}),
        made_run("O2", [1.2 * loss for loss in falling], seconds=0.004, memory=6),
        made_run("O3", [*falling[:20], *[NAN] * 20], memory=5),
        made_run("O4", falling[:7], outcome="crashed", reason="RuntimeError: out of <memory>"),
        made_run("O5", [], outcome="timed out", reason="it was stopped after 9 s"),
    ]


def eventful_comparison() -> Comparison:
    return compared(eventful(), tolerance=0.05)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
