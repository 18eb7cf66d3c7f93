"""Each of torch's engines at each level trains what one process trains on the batches of all ranks.

A gradient on one rank overflows now and then: all ranks skip that step, and hold the same scale and
the same parameters after it, bit for bit.
"""

import math
from itertools import product

import pytest
import rank_training as training
import ranks
import torch
from rank_training import Trained
from support import nightly_but

STEPS, LR = 8, 0.02
#: A result in the dtype that a level computes in is wrong by so much of itself, at most.
ROUNDING = {"O0": 2**-24, "O1": 2**-11, "O2": 2**-11, "O3": 2**-11, "O4": 2**-8, "O5": 2**-8}
#: How often a gradient was rounded by the ranks or by one process, and not by the other: three
#: times each when it is summed in half over four ranks, or parts; or a layer's output is, over the
#: ranks of tensor parallel, and the two gradients that come of it.
MOST_ROUNDINGS = 6
#: Of parameters of 1 or so that were summed in another order in fp32.
FLOAT_NOISE = 1e-5
#: ZeRO and FSDP1 have the fp32 values of a rank's share, and half ones of the rest.
READ_IN_HALF = ("zero", "fsdp1")


def tolerance(engine: str, level: str) -> float:
    """Return the largest difference of a parameter after the training.

    AdamW moves a parameter by LR in a step. A gradient that is wrong by r of itself makes both of
    the moments wrong, and their quotient by 2 r.
    """
    moved = STEPS * LR * 2 * MOST_ROUNDINGS * ROUNDING[level] + FLOAT_NOISE
    if level == "O3":  # each step is rounded
        return moved + STEPS * ROUNDING[level]
    is_read_in_half = engine in READ_IN_HALF and level in ("O2", "O5")
    return moved + (ROUNDING[level] if is_read_in_half else 0.0)


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


def assert_trained_alike(result: Trained, alone: Trained, engine: str, level: str) -> None:
    assert result.scales == alone.scales
    assert result.skipped == alone.skipped
    assert result.losses == pytest.approx(alone.losses, rel=0.02, abs=1e-3)
    assert finite(result.norms) == pytest.approx(finite(alone.norms), rel=0.02)
    assert training.difference(result, alone) < tolerance(engine, level)


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
        STEPS,
        PLANTS,
        max_norm=0.5 if clipped else None,
        size=size,
    )
    for level in levels:
        assert_ranks_agree([one[level][0] for one in found], engine)
        assert any(found[0][level][0].skipped) == (level in training.SCALED)
        assert_trained_alike(*found[0][level], engine, level)


@pytest.mark.slow(instead="each engine on 2 ranks at the other levels")
@pytest.mark.parametrize("engine", ENGINES)
def test_levels_without_masters(engine: str) -> None:
    assert_trains_as_one_process(engine, 2, True, ("O0", "O3"))


@pytest.mark.slow(instead="sequence parallel on two ranks, which has the same layers")
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("engine", ["tensor-fsdp2", "fsdp2-replicas"])
def test_engines_on_two_dimensions(engine: str, clipped: bool) -> None:
    assert_trains_as_one_process(engine, 4, clipped, LEVELS)


#: How far a parameter may be off.
BY_LAMB = {"O0": 1e-6, "O1": 1e-3, "O2": 1e-3, "O3": 1e-2, "O5": 1e-2}


@pytest.mark.parametrize(
    "case",
    nightly_but([("tensor", "O2"), ("fsdp2", "O3")], list(product(("tensor", "fsdp2"), BY_LAMB))),
    ids="-".join,
)
def test_lamb_takes_the_norms_of_whole_parameters(case: tuple[str, str]) -> None:
    for found, alone in ranks.run(training.trained_by_lamb, *case):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=BY_LAMB[case[1]])
