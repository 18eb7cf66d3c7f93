"""What a session counts: steps, skips known at once or late, and levels in their order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.step.history import History, Prepared, StepCount


class Arriving:
    """A host copy that arrives when it is told to."""

    def __init__(self, flag: float) -> None:
        self.has_arrived = False
        self._flag = torch.tensor(flag)

    def ready(self) -> bool:
        return self.has_arrived

    def wait(self) -> Tensor:
        self.has_arrived = True
        return self._flag


@given(st.lists(st.sampled_from(["skipped", "late", "late skipped", "arrives"]), max_size=30))
def test_steps_and_skips_are_counted_whenever_outcomes_arrive(events: list[str]) -> None:
    count, copies = StepCount(), []
    for event in events:
        if event == "arrives":
            for copy in copies:
                copy.has_arrived = True
        elif event == "skipped":
            count.add_skipped()
        else:
            copies.append(Arriving(float(event == "late skipped")))
            count.add_late(copies[-1])
    assert count.steps == len(events) - events.count("arrives")
    assert count.skipped == events.count("skipped") + events.count("late skipped")
    assert all(copy.has_arrived for copy in copies)


def test_a_step_waits_for_no_outcome() -> None:
    count, copy = StepCount(), Arriving(1.0)
    count.add_late(copy)
    assert not copy.has_arrived


def test_levels_and_optimizers_stay_in_the_order_in_which_they_came() -> None:
    history = History()
    assert history.since is None
    rows = [Prepared("SGD", "O2", {0: 0}, StepCount()), Prepared("Adam", "O1", {0: 1}, StepCount())]
    for row in rows:
        history.add(row.level, [row])
        since = history.since
    history.add("O2")
    assert history.levels == ["O2", "O1"]
    assert history.optimizers == rows
    assert history.since is since is not None
