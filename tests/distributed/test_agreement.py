"""All ranks that make a step together skip it together, and say so where they cannot."""

import agreeing
import pytest
import ranks
import torch
from second_device import SECOND, SecondDevice
from support import nightly_but
from test_engines import PLANTS, assert_ranks_agree
from torch import distributed

from amp_patch.distributed import agreement


@pytest.mark.parametrize("failing", nightly_but([1], [0, 1, 2]))
def test_ranks_of_a_given_group_skip_together(failing: int) -> None:
    assert ranks.run(agreeing.given_group, failing, size=3) == [[False, True, False]] * 3


def test_an_overflow_that_one_rank_puts_back_skips_on_all() -> None:
    assert ranks.run(agreeing.put_back) == [[False, True, False]] * 2


def test_ranks_that_average_by_hand_skip_alike_and_may_make_other_numbers_of_blocks() -> None:
    with ranks.Ranks() as two:
        first, second = two.run(agreeing.averaged_by_hand, ("O1", "O2"))
        moved = two.run(agreeing.other_numbers_of_blocks, ("O1", "O2"))
    assert moved == [pytest.approx([0.1 * 2 * 4 / 16] * 4, rel=1e-5)] * 2
    for (weight, skipped), (other, others_skipped) in zip(first, second, strict=True):
        assert skipped == others_skipped == [False, True, False]
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, other)


def test_ranks_of_no_known_group_skip_a_closure_by_the_gradients_that_they_share() -> None:
    with ranks.Ranks() as two:
        for sharing in ("hand", "ddp"):
            (first, skipped), (second, others_skipped) = two.run(agreeing.closure_by, sharing)
            assert skipped == others_skipped == [False, sharing == "hand", False]
            assert torch.isfinite(first).all()
            assert torch.equal(first, second)


def test_an_overflow_is_traced_where_no_rank_waits_for_the_second_run_of_another() -> None:
    with ranks.Ranks() as two:
        for kind in ("sharded", "wrapped"):
            for said, goes_on in two.run(agreeing.traced, kind, timeout=20):
                assert "sends tensors to other ranks" in said
                assert goes_on
        (said, goes_on), (others_said, others_go_on) = two.run(agreeing.traced, "after")
    assert "from another one" in said
    assert "the cast to float16 returned inf" in others_said
    assert goes_on
    assert others_go_on


@pytest.mark.parametrize("found", [[], [0.0], [0.0, 1.0]])
def test_the_flag_is_float32_where_a_script_has_another_default_dtype(found: list[float]) -> None:
    flags = [torch.full((1,), one, dtype=torch.float32) for one in found]
    torch.set_default_dtype(torch.float64)
    try:
        flag = agreement.agree(flags, [], torch.device("cpu"), 65536.0, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (flag.dtype, flag.tolist()) == (torch.float32, [max(found, default=0.0)])


def test_another_scale_on_one_rank_is_told_of_on_all_with_their_names() -> None:
    for message in ranks.run(agreeing.other_scale):
        assert "1024.0 after 1 steps on rank 0, 2.0 after 1 steps on rank 1" in message
        assert "amp.load_state_dict()" in message


def test_another_number_of_steps_is_told_of() -> None:
    for message in ranks.run(agreeing.other_count):
        assert "after 2 steps on rank 0" in message
        assert "after 1 steps on rank 1" in message


def test_a_device_behind_the_host_compares_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device is a stand-in, and the other rank is played: it holds a larger scale."""
    monkeypatch.setattr(distributed, "all_reduce", lambda numbers, *_: numbers[1].mul_(2))
    monkeypatch.setattr(agreement, "_refuse", lambda groups, scale, steps: refused.append(steps))
    refused: list[int] = []
    with SecondDevice():
        flag = torch.ones(1, device=SECOND)
        for steps in (99, 100, 101, 200):
            assert agreement.agree([flag], [None], SECOND, 8.0, steps).item() == 1.0
    assert refused == [100, 200]


def test_ranks_that_begin_to_share_a_model_with_other_scales_or_dtypes_are_told_of() -> None:
    expected = {
        "loaded": ("loss scale 2.0 for 0 steps", "loss scale 4.0 for 0 steps"),
        "dtype": ("parameters in torch.float16", "parameters in torch.bfloat16"),
    }
    with ranks.Ranks() as two:
        for kind, (first, second) in expected.items():
            for said, before, after in two.run(agreeing.begun_apart, kind):
                assert first in said.partition("on rank 0")[0]
                assert second in said.partition("on rank 0")[2]
                assert torch.equal(before, after)


def test_ranks_may_begin_apart_by_counts_of_a_scale_that_stays_and_by_blocks_of_their_own() -> None:
    assert ranks.run(agreeing.begun_alike, timeout=20) == [[], []]


def test_a_loss_of_a_closure_that_one_rank_finds_infinite_skips_on_all_without_a_warning() -> None:
    assert ranks.run(agreeing.closure, 0) == [[True, True]] * 2


def test_a_scale_beside_a_model_of_one_rank_is_told_of() -> None:
    (said, scales, weight), (others_said, others_scales, others_weight) = ranks.run(
        agreeing.beside_a_model_of_its_own, 1
    )
    assert len(said) == len(others_said) == 1
    assert "num_losses=2" in said[0]
    assert scales != others_scales
    assert not torch.equal(weight, others_weight)


def test_a_scale_of_its_own_beside_a_model_of_one_rank_is_that_of_all() -> None:
    (said, *found), (_, *others) = ranks.run(agreeing.beside_a_model_of_its_own, 2)
    assert said == []
    assert found[0] == others[0]
    assert torch.equal(found[1], others[1])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["ignored", "outside"])
def test_parameters_of_one_rank_that_are_stepped_with_shared_ones_are_told_of(
    kind: str, level: str
) -> None:
    (said, weight), (_, other) = ranks.run(
        agreeing.beside_parameters_of_its_own, kind, level, False
    )
    assert len(said) == 1
    assert "of 2 that it does not" in said[0]
    assert "process_group=torch.distributed.group.WORLD" in said[0]
    assert not torch.equal(weight, other)  # which nothing else tells of
    (said, weight), (_, other) = ranks.run(agreeing.beside_parameters_of_its_own, kind, level, True)
    assert said == []
    assert torch.equal(weight, other)


def test_parameters_of_one_rank_need_no_others_where_no_step_is_skipped() -> None:
    (said, weight), (_, other) = ranks.run(
        agreeing.beside_parameters_of_its_own, "ignored", "O4", False
    )
    assert said == []
    assert torch.equal(weight, other)


def test_whole_parameters_beside_those_that_ranks_split_skip_with_them() -> None:
    (said, scales, whole), (_, others_scales, others) = ranks.run(
        agreeing.two_optimizers_of_one_loss
    )
    assert said == []
    assert scales == others_scales == [2.0**14, 2.0**13, 2.0**13, 2.0**13]
    assert all(map(torch.equal, whole, others))


@pytest.mark.parametrize("engine", nightly_but(["fsdp2"], ["ddp", "fsdp2", "sequence"]))
@pytest.mark.parametrize("level", nightly_but(["O2"], ["O1", "O2"]))
def test_a_scale_that_a_device_moves_is_that_of_all_ranks(engine: str, level: str) -> None:
    results = ranks.run(agreeing.behind_the_host, engine, level, 8, PLANTS)
    assert_ranks_agree([ahead for ahead, _ in results], engine)
    for ahead, waiting in results:
        assert [step for step, skipped in enumerate(ahead.skipped) if skipped] == sorted(PLANTS)
        assert ahead.scales == waiting.scales
        assert all(map(torch.equal, ahead.computed, waiting.computed))


@pytest.mark.slow(instead="8 steps, clipped, each engine on 2 ranks")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1", "zero"])
def test_random_infs_leave_ranks_equal(engine: str, level: str) -> None:
    for size in (2, 4):
        results = ranks.run(agreeing.random_infs, engine, level, 100, size=size, timeout=300)
        assert 10 < sum(results[0].skipped) < 60
        assert_ranks_agree(results, engine)
        assert all(torch.isfinite(one).all() for one in results[0].computed)
