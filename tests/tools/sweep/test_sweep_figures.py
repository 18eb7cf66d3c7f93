"""Warm-up, verdicts, comparison and recommendation, on runs whose figures are known."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import INF, MEBIBYTE, NAN, made_run

from amp_patch.levels import OPT_LEVELS
from amp_patch.tools.sweep import tables, verdicts, wording
from amp_patch.tools.sweep.comparison import compared
from amp_patch.tools.sweep.recommendation import recommend
from amp_patch.tools.sweep.steps import Recording as Recorded
from amp_patch.tools.sweep.steps import Step, unlike_skips
from amp_patch.tools.sweep.warm_up import timed, warm_up_steps

FALLING = [2.0 * 0.9**step for step in range(40)]
positive = st.floats(1e-4, 1e4)


def steps_of(*seconds: float) -> list[Step]:
    return [Step(one) for one in seconds]


def test_every_level_has_its_colour_and_its_dashes() -> None:
    assert wording.COLORS.keys() == wording.DASHES.keys() == OPT_LEVELS.keys()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((9, 1, 1, 1, 1, 1), 1),
        ((1, 1, 1, 1, 1, 1), 1),
        ((9, 5, 1.4, 1, 1, 1), 2),
        ((9, 1, 9, 1, 1, 1), 1),
        ((9, 9, 9, 9, 1, 1), 3),
        ((9, 9, 9, 9, 1, 1, 1, 1), 4),
        ((9,), 1),
    ],
)
def test_warm_up_is_the_slow_steps_at_the_start(seconds, expected: int) -> None:
    assert warm_up_steps([steps_of(*seconds)]) == expected


def test_the_longest_warm_up_is_that_of_all_runs() -> None:
    runs = [steps_of(9, 1, 1, 1, 1, 1), steps_of(9, 9, 1, 1, 1, 1), []]
    assert warm_up_steps(runs) == 2
    assert [timed(steps, 2) for steps in runs] == [[1] * 4, [1] * 4, []]


def test_a_counted_step_has_no_time() -> None:
    steps = steps_of(9, 50, 9, 1, 1, 1, 1, 1)
    steps[1].counted = steps[5].counted = True
    assert warm_up_steps([steps]) == 3
    assert timed(steps, 3) == [1, 1, 1, 1]


@given(st.lists(st.lists(positive, min_size=1), min_size=1))
def test_warm_up_takes_at_most_half_of_the_steps(runs: list[list[float]]) -> None:
    found = warm_up_steps(steps_of(*seconds) for seconds in runs)
    assert 1 <= found <= max(1, max(len(seconds) // 2 for seconds in runs))


@pytest.mark.parametrize(
    ("run", "kind", "step", "words"),
    [
        (made_run("O1", FALLING), "ok", None, ""),
        (made_run("O1", [1.2 * loss for loss in FALLING]), "deviates", None, r"\+20\.0%.*5\.0%"),
        (made_run("O1", [0.0] * 40), "deviates", None, r"-100\.0%"),
        (made_run("O1", [*FALLING[:9], *[NAN] * 31]), "diverged", 10, "the loss is NaN"),
        (made_run("O1", [*FALLING[:9], *[INF] * 31]), "diverged", 10, "the loss is inf"),
        (made_run("O1", [INF, *FALLING[1:]]), "ok", None, ""),
        (made_run("O1", FALLING, skipped=range(11, 41)), "diverged", 11, "skipped, 30 of them"),
        (made_run("O1", FALLING, skipped=range(1, 6)), "ok", None, ""),
        (made_run("O1", FALLING[:9], skipped=range(1, 10)), "no steps", None, "more --steps"),
        (made_run("O1", [None] * 9), "no loss", None, "scale_loss"),
        (made_run("O1", FALLING[:9], outcome="crashed", reason="x"), "crashed", 9, "x"),
        (made_run("O1", [NAN] * 9, outcome="crashed", reason="x"), "diverged", 1, "NaN"),
        (
            made_run("O1", [1.0, *[NAN] * 8], outcome="crashed", reason="no disk"),
            "diverged",
            2,
            "the loss is NaN; crashed at step 9: no disk$",
        ),
        (made_run("O1", [], outcome="no steps", reason="x"), "no steps", None, "x"),
    ],
)
def test_the_verdict_says_what_became_of_a_level(run, kind: str, step, words: str) -> None:
    verdict = verdicts.verdict_of([run], [made_run("O0", FALLING)], tolerance=0.05)
    assert (verdict.kind, verdict.at_step) == (kind, step)
    assert re.search(words, verdict.reason)


def test_steps_that_are_skipped_for_want_of_zero_grad_are_told() -> None:
    run = made_run("O1", FALLING, skipped=range(2, 41))
    assert "zero_grad" not in verdicts.verdict_of([run], [], 0.05).reason
    run.steps[-1].uncleared = True
    assert "call optimizer.zero_grad() between steps" in verdicts.verdict_of([run], [], 0.05).reason


@pytest.mark.parametrize(
    ("losses", "skipped", "at_step", "words"),
    [
        ([2.0, NAN, NAN, 1.0, 1.0, 1.0], (), 2, "the loss is NaN, to the end of that training"),
        ([2.0, 1.0, 1.0, 2.0, INF, INF], (), 5, "the loss is inf"),
        ([2.0, NAN, 1.0, 2.0, NAN, 1.0], (), None, ""),
        (
            [0.7, 0.5, 2e4, 3e11, 5.0, 6e4],
            (),
            3,
            "10,000 times what it was, to the end of that training",
        ),
        ([0.7, 0.5, 2e4, 300.0, -6e6, -7e7], (), 3, "what it was, to the end of that training"),
        ([300.0, 0.5, 2e6, 1e6, 2e9, 5e9], (), None, ""),  # too little, or not to the end
        ([0.0, 0.0, 2e6, NAN, INF, 2e6], (), None, ""),  # whose first one tells nothing
        ([0.0, 0.5, 9.0, 1e-9, 9e3, 9e3], (), None, ""),  # a loss that begins near 0
        ([1.0] * 120, range(31, 61), 31, "30 of them, to the end of that training"),
        ([1.0] * 120, range(50, 75), None, ""),  # some at the end of one, some in the next
    ],
)
def test_each_training_of_a_script_may_diverge(losses, skipped, at_step, words: str) -> None:
    run = made_run("O1", losses, skipped=skipped)
    for number, step in enumerate(run.steps):
        step.training = number >= len(losses) // 2
    found = verdicts.divergence(run.steps)
    assert (found and found.at_step) == at_step
    assert found is None or found.reason.endswith(words)


def test_the_worst_round_decides() -> None:
    rounds = [made_run("O1", FALLING), made_run("O1", [NAN] * 40, number=2)]
    references = [made_run("O0", FALLING), made_run("O0", FALLING, number=2)]
    assert verdicts.verdict_of(rounds, references, 0.05).kind == "diverged"


def test_rounds_may_leave_the_finite_range_on_either_side() -> None:
    """As a critic's loss may, whose sign says nothing."""
    ends = ((1, INF), (2, -INF))
    runs = [made_run("O1", [*FALLING, *[end] * 10], number=number) for number, end in ends]
    references = [made_run("O0", FALLING, number=number) for number, _ in ends]
    _, row = compared([*references, *runs], 0.05).rows
    assert row.verdict.kind == verdicts.DIVERGED
    assert math.isnan(row.final_loss)
    assert row.deviation.low == -row.deviation.high == -INF


def test_losses_are_compared_round_by_round() -> None:
    rounds = [made_run("O1", FALLING), made_run("O1", [3.0] * 40, number=2)]
    references = [made_run("O0", FALLING), made_run("O0", [2.0] * 40, number=2)]
    assert verdicts.deviations(rounds, references) == pytest.approx([0.0, 0.5])


def test_losses_that_end_near_0_are_compared_by_what_they_fell() -> None:
    rounds = [made_run("O1", [*[1.0] * 20, *[2e-5] * 20])]
    references = [made_run("O0", [*[1.0] * 20, *[1e-5] * 20])]
    assert verdicts.verdict_of(rounds, references, 0.05).kind == verdicts.OK


def test_a_level_that_makes_statistics_infinite_is_not_ok_whatever_its_loss() -> None:
    run, reference = made_run("O3", FALLING), made_run("O0", FALLING)
    run.spoiled = ["running_var of `bn` (BatchNorm2d) holds inf, in float16"]
    found = verdicts.verdict_of([run], [reference], tolerance=0.05)
    assert (found.kind, found.reason) == (
        verdicts.DEVIATES,
        f"{run.spoiled[0]}, and evaluations with it are wrong",
    )
    reference.spoiled = run.spoiled
    assert verdicts.verdict_of([run], [reference], tolerance=0.05).kind == verdicts.OK
    assert verdicts.verdict_of([reference], [reference], tolerance=0.05).kind == verdicts.OK


@pytest.mark.parametrize("references", [[], [made_run("O0", [NAN] * 9)]])
def test_without_a_reference_nothing_is_compared(references) -> None:
    verdict = verdicts.verdict_of([made_run("O1", FALLING)], references, 0.05)
    assert verdict.kind == "not compared"
    assert "O0" in verdict.reason


def test_the_figures_of_one_round() -> None:
    runs = [made_run("O0", FALLING), made_run("O1", FALLING, seconds=0.005, memory=4, skipped={3})]
    comparison = compared(runs, 0.05)
    row = comparison.rows[1]
    assert comparison.warm_up == 2  # the second is counted, and has no time
    assert row.seconds.middle == pytest.approx(0.005)
    assert (row.speed_up.low, row.speed_up.middle, row.speed_up.high) == pytest.approx(
        (2 * 0.95 / 1.05, 2, 2 * 1.05 / 0.95)
    )
    assert (row.memory, row.memory_ratio, row.rss) == (4 * MEBIBYTE, 0.4, 300 * MEBIBYTE)
    assert row.final_loss == pytest.approx(sum(FALLING[-4:]) / 4)
    assert (row.steps, row.skipped, row.culprits) == (40, 1, {"fc.weight": 1})


def test_the_spread_of_several_rounds_is_that_of_the_rounds() -> None:
    runs = []
    for number, (own, reference) in enumerate([(0.01, 0.02), (0.01, 0.03), (0.02, 0.02)], 1):
        runs += [
            made_run("O0", FALLING, seconds=reference, number=number),
            made_run("O1", [3.0] * 40, seconds=own, number=number),
        ]
    row = compared(runs, 0.05).rows[1]
    assert (row.speed_up.low, row.speed_up.middle, row.speed_up.high) == pytest.approx((1, 2, 3))
    assert (row.seconds.low, row.seconds.middle, row.seconds.high) == pytest.approx(
        (0.01, 0.01, 0.02)
    )


def test_the_spread_of_memory_is_that_of_the_rounds() -> None:
    runs = [made_run("O0", FALLING, number=one, memory=size) for one, size in ((1, 4), (2, 6))]
    found = compared([*runs, *[made_run("O1", [], number=one) for one in (1, 2)]], 0.05)
    spread = found.rows[0].memory_spread
    assert (spread.low, spread.middle, spread.high) == (4 * MEBIBYTE, 5 * MEBIBYTE, 6 * MEBIBYTE)
    assert wording.range_of_sizes(spread) == "4–6 MiB"
    assert found.rows[1].memory_spread is None
    names = [[name for name, _ in group] for group in tables.columns(found)]
    assert names[1] == ["memory", "spread", "vs O0", "RAM"]
    once = compared(runs[:1], 0.05)
    assert once.rows[0].memory_spread is None
    assert [name for name, _ in tables.columns(once)[1]] == ["memory", "vs O0", "RAM"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_round_says_what_it_cannot_see(rounds: int) -> None:
    runs = [
        made_run(level, FALLING, seconds=seconds, number=number)
        for number in range(1, rounds + 1)
        for level, seconds in (("O0", 0.01), ("O1", 0.005))
    ]
    reason = recommend(compared(runs, 0.05)).reason
    assert ("One round cannot see" in reason) is (rounds == 1)


@pytest.mark.parametrize(("steps", "rounds", "level"), [(6, 1, "O0"), (7, 1, "O1"), (4, 3, "O1")])
def test_no_level_is_faster_by_a_handful_of_steps(steps: int, rounds: int, level: str) -> None:
    runs = [
        made_run(name, FALLING[:steps], seconds=seconds, number=number)
        for number in range(1, rounds + 1)
        for name, seconds in (("O0", 0.01), ("O1", 0.005))
    ]
    found = recommend(compared(runs, 0.05))  # of each run 2 steps are warm-up
    assert found.level == level
    assert ("Fewer than 5 steps of O1" in found.reason) is (level == "O0")


def test_what_did_not_end_has_no_final_loss_and_no_deviation() -> None:
    runs = [made_run("O0", FALLING), made_run("O1", FALLING[:9], outcome="crashed")]
    row = compared(runs, 0.05).rows[1]
    assert (row.final_loss, row.deviation) == (None, None)


@pytest.mark.parametrize(
    ("others", "level", "words"),
    [
        ([("O1", 0.5, 10, 1.0), ("O2", 0.3, 10, 1.0)], "O2", "3.33 times as fast as O0"),
        ([("O1", 0.5, 10, 1.0), ("O2", 0.3, 10, 1.2)], "O1", "2.00 times as fast as O0"),
        ([("O1", 0.5, 10, 1.0), ("O2", 0.5, 10, 1.0)], "O1", "O2 cannot be told from it"),
        ([("O1", 0.98, 10, 1.0)], "O0", "or saves memory"),
        ([("O1", 0.98, 5, 1.0)], "O1", "0.50 times its memory"),
        ([("O1", 3.0, 5, 1.0)], "O0", "O1 takes 0.50 times as much, at 0.33 times the speed"),
        ([("O1", 0.5, 5, 1.5)], "O0", "No other level that came to its end"),
        ([], "O0", "No other level was swept"),
    ],
)
def test_the_recommendation_and_its_reason(others, level: str, words: str) -> None:
    """Others: level, its time against O0's, memory, and factor of the loss."""
    runs = [made_run("O0", FALLING)]
    for name, time, memory, factor in others:
        losses = [factor * loss for loss in FALLING]
        runs.append(made_run(name, losses, seconds=0.01 * time, memory=memory))
    found = recommend(compared(runs, 0.05))
    assert found.level == level
    assert words in found.reason


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([made_run("O1", FALLING)], "O0 was not swept.*These trained: O1"),
        ([made_run("O0", [NAN] * 9), made_run("O1", FALLING)], "O0 diverged.*These trained: O1"),
        ([made_run("O0", [NAN] * 9), made_run("O1", [NAN] * 9)], "nothing to recommend"),
    ],
)
def test_nothing_is_recommended_that_nobody_can_judge(runs, words: str) -> None:
    found = recommend(compared(runs, 0.05))
    assert found.level is None
    assert re.search(words, found.reason)


def test_a_run_without_losses_is_left_to_the_user() -> None:
    runs = [made_run("O0", [None] * 20), made_run("O1", [None] * 20, seconds=0.001)]
    found = recommend(compared(runs, 0.05))
    assert found.level == "O1"
    assert "for you to judge" in found.reason


def test_skips_that_differ_between_ranks_are_found() -> None:
    ranks = {rank: Recorded(steps=[Step() for _ in range(4)]) for rank in (0, 1)}
    assert unlike_skips(ranks) == []
    ranks[1].steps[2].skipped = True
    assert unlike_skips(ranks) == [3]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (wording.size(1023), "1023 B"),
        (wording.size(1.5 * 2**20), "1.5 MiB"),
        (wording.size(None), "–"),
        (wording.rate(0.0004), "2500"),
        (wording.scale(65536.0), "2^16"),
        (wording.scale(2.0**-24), "2^-24"),
        (wording.scale(128.0), "128"),
        (wording.scale(100000.0), "100000"),
        (wording.share(0.0123), "+1.2%"),
        (wording.share(NAN), "–"),
        (wording.share(math.inf), "+inf%"),
        (wording.loss(NAN), "nan"),
    ],
)
def test_figures_read_well(shown: str, expected: str) -> None:
    assert shown == expected
