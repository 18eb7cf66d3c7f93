"""A pipeline of two ranks trains what one process trains, whatever its schedule.

An inf in the loss of one micro-batch, or in the gradients of one stage alone, makes all stages skip
that step.
"""

from typing import Any

import piping
import pytest
import ranks
from rank_training import Trained
from support import nightly_but
from test_engines import LEVELS, assert_trained_alike


@pytest.mark.parametrize("clipped", nightly_but([True], [True, False]))
@pytest.mark.parametrize("schedule", nightly_but(["1F1B"], [*piping.SINGLE, *piping.LOOPED]))
def test_stages_train_what_one_process_trains(schedule: str, clipped: bool) -> None:
    assert_trains_as_one_process(schedule, clipped, LEVELS)


def assert_trains_as_one_process(schedule: str, clipped: bool, levels: tuple[str, ...]) -> None:
    found = ranks.run(piping.train_and_compare, schedule, levels, 8, 0.5 if clipped else None)
    in_order = found if piping.LAST.get(schedule, 1) else found[::-1]
    for level in levels:
        assert_alike([one[level][0] for one in in_order], found[0][level][1], level)


@pytest.mark.slow(instead="1F1B at the other levels")
@pytest.mark.parametrize("schedule", ["1F1B", "zero-bubble", "zero-bubble-v"])
def test_levels_without_masters(schedule: str) -> None:
    assert_trains_as_one_process(schedule, True, ("O0", "O3"))


@pytest.mark.slow(instead="stages that replicas have whole")
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "interleaved"])
def test_stages_that_fsdp2_shards(schedule: str) -> None:
    assert_replicas_train_as_one_process(schedule, shards=True)


@pytest.mark.parametrize("schedule", nightly_but(["1F1B"], ["GPipe", "1F1B", "interleaved"]))
def test_stages_that_replicas_have_whole(schedule: str) -> None:
    assert_replicas_train_as_one_process(schedule, shards=False)


def assert_replicas_train_as_one_process(schedule: str, shards: bool) -> None:
    found = ranks.run(piping.train_and_compare, schedule, LEVELS, 8, 0.5, 2, shards, size=4)
    for level in LEVELS:
        alone = found[0][level][1]
        # each replica of the last stage knows the losses of its half of the rows
        halves = zip(found[2][level][0].losses, found[3][level][0].losses, strict=True)
        losses = [sum(pair) / 2 for pair in halves]
        first, last = found[0][level][0], found[3][level][0]._replace(losses=losses)
        assert_alike([first, found[1][level][0], found[2][level][0], last], alone, level)


def assert_alike(results: list[Trained], alone: Trained, level: str) -> None:
    """Compare ranks with each other, and what the last one knows with one process."""
    last = results[-1]
    whole: dict[str, Any] = {}
    for one in results:
        assert one.scales == last.scales
        assert one.skipped == last.skipped
        assert str(one.norms) == str(last.norms)
        whole.update(one.params)
    losses = [
        known if skipped else loss  # of a micro-batch that overflows it is inf
        for known, loss, skipped in zip(alone.losses, last.losses, alone.skipped, strict=True)
    ]
    assert_trained_alike(last._replace(params=whole, losses=losses), alone, "pipeline", level)


def test_stages_that_decide_alone_are_warned() -> None:
    for alone, together in ranks.run(piping.warnings_with_and_without_a_group):
        assert len(alone) == 1
        assert "all stages of a pipeline must skip the same steps" in alone[0]
        assert together == []
    ((alone, _),) = ranks.run(piping.warnings_with_and_without_a_group, size=1)
    assert alone == []


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("schedule", nightly_but(["zero-bubble"], piping.LOOPED))
def test_a_split_backward_of_replicas_is_refused(schedule: str, shards: bool) -> None:
    (said,) = ranks.run(piping.said_of_replicas, schedule, shards, size=1)
    if schedule == "interleaved":
        assert said == "nothing"
    else:
        assert "with 2 stages in DistributedDataParallel or sharded by fully_shard()" in said
        assert "ScheduleInterleaved1F1B(stages, ...)" in said
