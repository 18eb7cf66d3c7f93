"""Each of torch's engines at each level trains what one process trains on the batches of all ranks.

A gradient on one rank overflows now and then: all ranks skip that step, and hold the same scale and
the same parameters after it, bit for bit.
"""

import math

import pytest
import rank_training as training
import ranks
import torch
from rank_training import Trained
from support import nightly_but

#: Largest difference of a parameter, which has moved by 0.16 at most, after the training: the ranks
#: round the sums of fewer rows, in bfloat16 to 8 bits.
TOLERANCE = {"O0": 1e-5, "O1": 1e-3, "O2": 1e-3, "O3": 4e-3, "O4": 12e-3, "O5": 12e-3}
LEVELS = ("O1", "O2", "O4", "O5")
#: step -> the rank that overflows.
PLANTS = {2: 0, 5: 1, 6: 1}


def assert_ranks_agree(results: list[Trained], engine: str) -> None:
    first = results[0]
    for other in results[1:]:
        assert other.scales == first.scales
        assert other.skipped == first.skipped
        assert other.losses == first.losses
        assert str(other.norms) == str(first.norms)  # after an inf they are NaN
        if training.averages_all(engine):  # the others hold parts
            assert all(map(torch.equal, other.computed, first.computed))
        if engine != "zero":  # of which each rank knows the fp32 values of its share
            assert all(torch.equal(other.params[name], first.params[name]) for name in first.params)


def finite(norms: list[float]) -> list[float]:
    return [norm if math.isfinite(norm) else -1.0 for norm in norms]


def assert_trained_alike(result: Trained, alone: Trained, level: str) -> None:
    assert result.scales == alone.scales
    assert result.skipped == alone.skipped
    assert result.losses == pytest.approx(alone.losses, rel=0.02, abs=1e-3)
    assert finite(result.norms) == pytest.approx(finite(alone.norms), rel=0.02)
    assert training.difference(result, alone) < TOLERANCE[level]


ENGINES = ("ddp", "fsdp2", "fsdp1", "zero", "tensor", "sequence")


@pytest.mark.parametrize("clipped", nightly_but([True], [True, False]))
@pytest.mark.parametrize("size", nightly_but([2], [2, 4]))
@pytest.mark.parametrize(
    "engine", nightly_but([one for one in ENGINES if one != "tensor"], ENGINES)
)
def test_ranks_train_what_one_process_trains(engine: str, size: int, clipped: bool) -> None:
    assert_trains_as_one_process(engine, size, clipped, LEVELS)


def assert_trains_as_one_process(
    engine: str, size: int, clipped: bool, levels: tuple[str, ...]
) -> None:
    found = ranks.run(
        training.train_and_compare,
        engine,
        levels,
        8,
        PLANTS,
        max_norm=0.5 if clipped else None,
        size=size,
    )
    for level in levels:
        assert_ranks_agree([one[level][0] for one in found], engine)
        assert any(found[0][level][0].skipped) == (level in training.SCALED)
        assert_trained_alike(*found[0][level], level)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_levels_without_masters(engine: str) -> None:
    assert_trains_as_one_process(engine, 2, True, ("O0", "O3"))


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [True, False])
def test_tensor_parallel_and_sharded_by_fsdp2(clipped: bool) -> None:
    assert_trains_as_one_process("tensor-fsdp2", 4, clipped, LEVELS)
