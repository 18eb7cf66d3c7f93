"""Ranks of the tests: what they return; a failure of one is told of, and leaves none behind."""

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest
import ranks
import torch
from torch import distributed


def rank_and_sum(start: int) -> tuple[int, float]:
    total = torch.tensor(float(start + distributed.get_rank()))
    distributed.all_reduce(total)
    return distributed.get_rank(), total.item()


def fail_on(failing: int) -> None:
    if distributed.get_rank() == failing:
        raise ValueError(f"rank {failing} fails")
    distributed.barrier()


def die_on(dying: int) -> None:
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == dying:
        store.wait(["both are here"])  # the other one would fail while it joins
        os._exit(3)
    store.set("both are here", "yes")
    time.sleep(60)


def test_each_rank_returns_its_result() -> None:
    assert ranks.run(rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(fail_on, 1)
    assert "ValueError: rank 1 fails" in caught.value.errors[1]
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_or_hangs_is_told_of_within_the_time() -> None:
    begin = time.monotonic()
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(die_on, 0)
    assert "died" in caught.value.errors[0]
    assert "die_on" in caught.value.errors[1]  # where it hung
    assert time.monotonic() - begin < ranks.TIMEOUT / 2
    assert multiprocessing.active_children() == []


@pytest.mark.slow(instead="ranks that take too long")
def test_torchrun_that_takes_too_long_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.torchrun("--nproc_per_node=2", script, tmp_path, timeout=25)
    for rank in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)
