"""FSDP2 and levels: each pair is right, or refused before anything is changed."""

import fully_sharding
import pytest
import ranks
import torch
from support import nightly_but

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("level", nightly_but(["O1"], ["O1", "O2"]))
def test_sharding_after_initialize_is_refused(level: str) -> None:
    for said in ranks.run(fully_sharding.late, level):
        assert "fully_shard(model) must come before amp.initialize()" in said[0]
        assert "FullyShardedDataParallel(model) must come before" in said[1]


SAME = [("O1", HALF), ("O2", HALF), ("O5", BFLOAT16)]


@pytest.mark.parametrize("case", nightly_but([("O2", HALF)], SAME))
def test_a_policy_of_the_levels_dtype_trains(case: tuple[str, torch.dtype]) -> None:
    for losses in ranks.run(fully_sharding.by_policy, *case):
        assert losses == sorted(losses, reverse=True)


OTHER = [("O1", BFLOAT16, "O4"), ("O2", BFLOAT16, "O5"), ("O4", HALF, "O1"), ("O5", HALF, "O2")]


@pytest.mark.parametrize("case", nightly_but([("O2", BFLOAT16, "O5")], OTHER))
def test_a_policy_of_another_half_dtype_is_refused(case: tuple[str, torch.dtype, str]) -> None:
    level, dtype, mend = case
    for said in ranks.run(fully_sharding.by_policy, level, dtype):
        assert f"param_dtype={dtype} for opt_level {level}" in said
        assert f"opt_level='{mend}'" in said
    with ranks.Ranks(1) as one:
        (said,) = one.run(fully_sharding.by_mixed_precision, level, dtype)
        assert f"param_dtype={dtype} for opt_level {level}" in said
        assert one.run(fully_sharding.by_mixed_precision, level, FLOAT) == ["nothing"]


def test_batch_norms_in_float32_are_gathered_by_themselves() -> None:
    for said in ranks.run(fully_sharding.batch_norms, False):
        assert "fully_shard(batch_norm)" in said
    for losses in ranks.run(fully_sharding.batch_norms, True):
        assert losses[-1] < losses[0]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch gathers by one mesh alone")
@pytest.mark.parametrize("level", nightly_but(["O2"], ["O1", "O2", "O5"]))
def test_parameters_of_one_module_may_be_gathered_by_several_groups(level: str) -> None:
    for losses in ranks.run(fully_sharding.two_groups, level):
        assert losses == sorted(losses, reverse=True)


def test_a_method_of_a_sharded_model_casts_whoever_is_told_of_it_first() -> None:
    with ranks.Ranks() as two:
        for is_torchs_first in (True, False):
            dtypes = two.run(fully_sharding.by_method, is_torchs_first)
            assert dtypes == [[HALF, FLOAT]] * 2


def test_flat_parameters_that_others_are_views_of_stay_in_float32() -> None:
    for keeps, stores in ranks.run(fully_sharding.original_params, ("O1", "O2")):
        assert keeps == "trains"
        assert "opt_level O2 stores parameters in half" in stores
        assert "use_orig_params=False" in stores
    # of one rank, where torch shards nothing
    ((stores,),) = ranks.run(fully_sharding.original_params, ("O2",), size=1)
    assert "use_orig_params=False" in stores


def test_a_fused_step_of_spread_parameters_is_torchs_and_that_is_said_once() -> None:
    for messages, are_equal in ranks.run(fully_sharding.fused):
        assert len(messages) == 1
        assert are_equal


def test_what_is_written_to_a_part_of_a_weight_counts() -> None:
    (found,) = ranks.run(fully_sharding.written_parts, "O2", size=1)
    assert found == dict.fromkeys(("state", "groups", "weights", "state as a whole"), True)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_model_runs_before_and_after_a_level(engine: str) -> None:
    for found in ranks.run(fully_sharding.before_and_after, engine, "O2"):
        assert found == [(FLOAT, True), (HALF, True), (FLOAT, True)]


@pytest.mark.parametrize(
    "case",
    [("fsdp2", "O2", "backward"), ("fsdp2", "O2", "forward", False), ("fsdp1", "O2", "forward")],
    ids=str,
)
def test_a_model_is_given_back_after_a_pass_that_failed(case: tuple[object, ...]) -> None:
    for found in ranks.run(fully_sharding.given_up, *case):
        assert found == [FLOAT]


@pytest.mark.parametrize("level", nightly_but(["O2"], ["O1", "O2"]))
def test_what_fsdp1_leaves_whole_counts_once_in_the_norm(level: str) -> None:
    with ranks.Ranks() as two:
        for is_given in (False, True):
            for norms, expected in two.run(fully_sharding.norms_beside_whole_ones, level, is_given):
                assert norms == pytest.approx([expected] * 2, rel=5e-3)


def test_gradients_that_fsdp1_leaves_on_a_rank_are_not_judged_yet() -> None:
    first, second = ranks.run(fully_sharding.flat_without_sync)
    assert first == second
    assert [skipped for skipped, _ in first] == [True, True]


@pytest.mark.parametrize("level", nightly_but(["O1"], ["O0", "O1", "O2", "O3", "O4", "O5"]))
def test_the_method_of_a_flat_model_clips_unscaled_gradients(level: str) -> None:
    for found, stepped, said in ranks.run(fully_sharding.clipped_by_the_model, level):
        assert found[0] == pytest.approx(found[1], rel=1e-3)
        assert found[0] > 0.5
        assert stepped == pytest.approx([0.5, 0.5], rel=5e-3)
        assert "needs unscaled gradients" in said
