"""Micro-batches under ``no_sync``: no rank decides by gradients that only it has."""

from typing import Any

import accumulating
import pytest
import ranks
import torch
from support import nightly_but
from test_engines import tolerance

LEVELS = ("O1", "O2", "O4", "O5")


def assert_alike(found: list[Any], are_same_scales: bool, levels: tuple[str, ...] = LEVELS) -> None:
    for level in levels:
        (params, scales, skipped), (alone, alone_scales, alone_skipped) = found[0][level]
        other, other_scales, other_skipped = found[1][level][0]
        assert scales == other_scales
        assert skipped == other_skipped
        assert all(map(torch.equal, params, other))
        assert skipped == alone_skipped
        if are_same_scales:
            assert scales == alone_scales
        assert max((a - b).abs().max() for a, b in zip(params, alone, strict=True)) < tolerance(
            "ddp", level
        )


@pytest.mark.parametrize("delayed", nightly_but([False], [False, True]))
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_gradients_that_only_one_rank_has_wait_for_the_others(engine: str, delayed: bool) -> None:
    found = ranks.run(accumulating.train_all, engine, LEVELS, delayed=delayed, synced=False)
    assert_alike(found, are_same_scales=True)


@pytest.mark.parametrize("engine", ["fsdp2-whole", "fsdp2-replicas"])
def test_gradients_that_fsdp2_keeps_to_itself_wait_for_the_others(engine: str) -> None:
    levels = ("O2",)
    found = ranks.run(accumulating.train_all, engine, levels, delayed=False, synced=False)
    assert_alike(found, are_same_scales=True, levels=levels)


def test_gradients_that_replicate_keeps_to_itself_wait_for_the_others() -> None:
    levels = ("O1", "O5")
    found = ranks.run(accumulating.train_all, "replicate", levels, delayed=False, synced=False)
    assert_alike(found, are_same_scales=True, levels=levels)


@pytest.mark.parametrize("level", nightly_but(["O2"], ["O1", "O2"]))
def test_gradients_that_wait_have_one_scale_where_another_model_moves_it(level: str) -> None:
    for pairs in ranks.run(accumulating.two_models, level):
        for trained, plain in pairs:
            torch.testing.assert_close(trained, plain, rtol=0.0, atol=0.005)


@pytest.mark.parametrize(("level", "is_scaled"), [("O2", True), ("O5", True), ("O5", False)])
def test_a_rank_that_steps_no_parameter_keeps_its_part_of_the_gradients(
    level: str, is_scaled: bool
) -> None:
    for trained, plain in ranks.run(accumulating.one_parameter, level, is_scaled, timeout=20):
        torch.testing.assert_close(trained, plain, rtol=0.0, atol=0.01)


@pytest.mark.slow(instead="blocks of which ranks share the last alone")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_blocks_that_all_share_are_added_unscaled(engine: str) -> None:
    found = ranks.run(accumulating.train_all, engine, LEVELS, delayed=False, synced=True)
    assert_alike(found, are_same_scales=False)  # the scale moves at each block


VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}  # torch itself has it fail where the first backward is not shared
WRAPPERS = [
    (VIEWS, True),
    (VIEWS, False),
    (STATIC, True),
    ({**VIEWS, **STATIC}, True),
    ({"find_unused_parameters": True}, False),
    ({"compressed": True}, False),
]


@pytest.mark.parametrize("case", nightly_but([WRAPPERS[0]], WRAPPERS))
def test_options_of_the_wrapper(case: tuple[dict[str, bool], bool]) -> None:
    wrapper, synced = case
    found = ranks.run(
        accumulating.train_all, "ddp", LEVELS, delayed=False, synced=synced, wrapper=wrapper
    )
    assert_alike(found, are_same_scales=not synced)


@pytest.mark.parametrize("case", ["labels", "labels of rank 0", "reference"])
def test_of_several_forwards_before_a_backward_one_that_shares_is_enough(case: str) -> None:
    levels = (None, "O1", "O2", "O5")
    found = ranks.run(accumulating.several_forwards, case, levels, timeout=60)
    for level, one, other in zip(levels, *found, strict=True):
        assert all(map(torch.equal, one, other)), level
        for param, exact in zip(one, found[0][0], strict=True):
            torch.testing.assert_close(param, exact, rtol=0.02, atol=0.02)
