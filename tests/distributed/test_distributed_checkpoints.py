"""Checkpoints of `torch.distributed.checkpoint` at each level, by each engine that it knows."""

from pathlib import Path

import pytest
import ranks
import resuming
import torch
from support import nightly_but

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


#: torch cannot copy what FSDP1 without a mesh returns.
CASES = [("ddp", False), ("fsdp2", False), ("fsdp1", False), ("tensor", False)]
CASES += [("ddp", True), ("fsdp2", True), ("fsdp1-mesh", True), ("tensor", True)]


@pytest.mark.parametrize("case", nightly_but([("ddp", False), ("fsdp2", False)], CASES))
def test_a_resumed_training_is_to_the_bit_the_one_that_went_on(
    case: tuple[str, bool], tmp_path: Path
) -> None:
    engine, is_async = case
    levels = ("O1", "O2", "O5") if not is_async else LEVELS
    for found in ranks.run(resuming.resume, engine, levels, str(tmp_path), is_async):
        assert found == dict.fromkeys(levels, True)


@pytest.mark.slow(instead="the same number of ranks")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_another_number_of_ranks_goes_on(level: str, tmp_path: Path) -> None:
    (params, full), (_, rest) = ranks.run(resuming.save, "fsdp2", level, str(tmp_path), size=2)
    found = ranks.run(resuming.load, "fsdp2", level, str(tmp_path), size=3)
    assert len({largest for _, largest in found}) == 1
    for loaded, largest in found:
        assert largest < 2.0
        assert all(torch.equal(loaded[name], params[name]) for name in params)
    # The full state is on rank 0 alone, in fp32, as one process would have it.
    assert not rest["model"]
    assert {name: value.dtype for name, value in full["model"].items()} == dict.fromkeys(
        params, torch.float32
    )
    assert all(torch.equal(full["model"][name], params[name]) for name in params)
    assert full["optimizer"]["state"]["0.weight"]["exp_avg"].shape == params["0.weight"].shape


def test_weights_that_rank_0_sends_are_not_rounded() -> None:
    assert ranks.run(resuming.sent_by_rank_0, "O2") == [True, True]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
def test_the_state_of_a_model_alone_has_its_masters(engine: str) -> None:
    assert ranks.run(resuming.model_state_alone, engine, size=3) == [True] * 3


SAVED = [(engine, level) for engine in ("zero", "fsdp1") for level in ("O1", "O2", "O3", "O5")]


@pytest.mark.parametrize("case", nightly_but([("zero", "O2"), ("fsdp1", "O2")], SAVED))
def test_masters_that_no_model_has_are_saved_with_the_optimizer(case: tuple[str, str]) -> None:
    assert ranks.run(resuming.resume_from_states, *case) == [True, True]


@pytest.mark.parametrize(("level", "rounding"), [("O1", 0.0), ("O2", 2**-11), ("O5", 2**-8)])
def test_fsdp1_saves_and_loads_the_state_of_an_optimizer_itself(
    level: str, rounding: float
) -> None:
    (largest,) = ranks.run(resuming.by_fsdp1, level, size=1)
    assert largest <= rounding  # the weights are saved as they are stored
