"""A rank that fails in the middle of a step: the others get an error, and keep whole steps.

After a restart a training goes on from its last checkpoint, with the losses that it would have had.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import failing
import pytest
import ranks
import torch
from failing import Seen
from support import nightly_but

RUNS = [
    (engine, level, part)
    for engine in ("ddp", "fsdp2", "zero", "tensor")
    for level in ("O1", "O2", "O5")
    for part in ("forward", "backward", "block", "clip", "step")
]


def fails_in_step_of_zero(engine: str, level: str, part: str) -> bool:
    """Return whether the others miss the rank first in ZeRO's own step.

    There each rank changes its share, and then gets those of the others. At O1 it is the first
    thing after the backward for which ranks wait for each other.
    """
    return engine == "zero" and (part == "step" or (level == "O1" and part in ("block", "clip")))


def assert_survived(seen: Seen, run: tuple[str, str, str]) -> None:
    """The error comes in the step that fails, or in the next one where it had all it needs."""
    assert seen.error is not None
    assert failing.FAILS_IN <= seen.steps <= failing.FAILS_IN + 1
    assert seen.is_whole or fails_in_step_of_zero(*run)


@pytest.mark.parametrize("run", nightly_but([("fsdp2", "O2", "block")], RUNS), ids="-".join)
def test_a_rank_that_dies_is_an_error_on_the_others(run: tuple[str, str, str]) -> None:
    begin = time.monotonic()
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(failing.survive, *run, failing.die)
    assert caught.value.errors == {1: "died without a word"}
    assert_survived(caught.value.results[0], run)
    assert time.monotonic() - begin < ranks.TIMEOUT / 2


@pytest.mark.parametrize("run", nightly_but([("ddp", "O1", "backward")], RUNS[1::5]), ids="-".join)
def test_a_rank_that_raises_is_an_error_on_the_others(run: tuple[str, str, str]) -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(failing.survive, *run, failing.run_out_of_memory)
    assert list(caught.value.errors) == [1]
    assert "OutOfMemoryError: a planted one" in caught.value.errors[1]
    assert_survived(caught.value.results[0], run)


@pytest.mark.slow(instead="a rank that dies under FSDP2, and one that raises under DDP")
@pytest.mark.parametrize("run", RUNS[::7], ids="-".join)
def test_a_rank_that_stalls_is_an_error_on_the_others_after_the_timeout(
    run: tuple[str, str, str],
) -> None:
    waiting, stalled = ranks.run(
        failing.survive, *run, failing.stall, collective_timeout=failing.STALLS / 3
    )
    assert "imed out" in str(waiting.error)
    assert_survived(waiting, run)
    assert stalled.error is not None  # it finds nobody when it comes back


def assert_went_on(again: list[Any], whole: list[Any]) -> None:
    first = failing.FAILS_IN // failing.SAVES_EVERY * failing.SAVES_EVERY
    for (losses, numbers), (known, known_numbers) in zip(again, whole, strict=True):
        assert losses == known[first:]
        assert all(map(torch.equal, numbers, known_numbers))


@pytest.mark.parametrize("engine", nightly_but(["fsdp2"], ["ddp", "fsdp2"]))
@pytest.mark.parametrize("level", nightly_but(["O2"], ["O1", "O2", "O5"]))
def test_a_training_goes_on_from_its_last_checkpoint(
    engine: str, level: str, tmp_path: Path
) -> None:
    whole = ranks.run(failing.go_on, engine, level, str(tmp_path / "whole"), False)
    folder = str(tmp_path / "interrupted")
    with pytest.raises(ranks.RankError):
        ranks.run(failing.go_on, engine, level, folder, True)
    assert_went_on(ranks.run(failing.go_on, engine, level, folder, False), whole)


@pytest.mark.slow(instead="a restart in forks")
@pytest.mark.parametrize(("engine", "level"), [("ddp", "O1"), ("fsdp2", "O2"), ("fsdp2", "O5")])
def test_torchrun_restarts_a_training_from_its_last_checkpoint(
    engine: str, level: str, tmp_path: Path
) -> None:
    whole = ranks.run(failing.go_on, engine, level, str(tmp_path / "whole"), False)
    folder = tmp_path / "restarted"
    folder.mkdir()
    options = "--max-restarts=1", "--nproc_per_node=2"
    path = os.pathsep.join(sys.path)
    # With one store for all of its groups, torch may hand a new rank the address of a dead one.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code, _, errors = ranks.torchrun(
        *options, failing.__file__, engine, level, folder, PYTHONPATH=path, **store
    )
    assert code == 0, errors
    assert_went_on([torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)], whole)
