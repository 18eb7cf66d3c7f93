"""A pipeline of two ranks trains what one process trains, whatever its schedule.

An inf in the loss of one micro-batch, or in the gradients of one stage alone, makes all stages skip
that step.
"""

from typing import Any

import piping
import pytest
import ranks
from support import nightly_but
from test_engines import LEVELS, assert_trained_alike


@pytest.mark.parametrize("clipped", nightly_but([True], [True, False]))
@pytest.mark.parametrize("schedule", nightly_but(["1F1B"], ["GPipe", "1F1B", "interleaved"]))
def test_stages_train_what_one_process_trains(schedule: str, clipped: bool) -> None:
    first, last = ranks.run(piping.train_and_compare, schedule, LEVELS, 8, 0.5 if clipped else None)
    for level in LEVELS:
        (stage, alone), (last_stage, _) = first[level], last[level]
        assert stage.scales == last_stage.scales
        assert stage.skipped == last_stage.skipped
        assert str(stage.norms) == str(last_stage.norms)
        whole: dict[str, Any] = {**stage.params, **last_stage.params}
        losses = [
            known if skipped else loss  # of a micro-batch that overflows it is inf
            for known, loss, skipped in zip(
                alone.losses, last_stage.losses, alone.skipped, strict=True
            )
        ]
        assert_trained_alike(last_stage._replace(params=whole, losses=losses), alone, level)


def test_stages_that_decide_alone_are_warned() -> None:
    for alone, together in ranks.run(piping.warnings_with_and_without_a_group):
        assert len(alone) == 1
        assert "all stages of a pipeline must skip the same steps" in alone[0]
        assert together == []
    ((alone, _),) = ranks.run(piping.warnings_with_and_without_a_group, size=1)
    assert alone == []
