"""Ways to start scripts, and names of submodules, that old scripts use."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from running import GLOO_ABORTS, RUN, run

RANKS = """
import argparse
from apex import amp
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)
# in one piece, which the other rank's does not part
print(f"{amp.__name__} on {parser.parse_args().local_rank}\\n", end="")
"""


@pytest.mark.slow(instead="torchrun without `amp-patch run`")
def test_torchs_launcher_runs_under_amp_patch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    launcher = ["torch.distributed.launch", "--nproc_per_node=2", "--master_port=0"]
    done = run([*RUN, "-m", *launcher, script])
    assert done.returncode == 0 or GLOO_ABORTS in done.stderr, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["apex.amp on 0", "apex.amp on 1"]


@pytest.mark.slow(instead="torch's own launcher, `--local-rank`")
def test_an_argument_of_earlier_launchers_comes_from_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS.replace("local-rank", "local_rank"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = f"{' '.join(RUN)} {script} --local_rank=$LOCAL_RANK"
    done = run([*torchrun, "--no-python", "bash", "-c", command])
    assert done.returncode == 0 or GLOO_ABORTS in done.stderr, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["apex.amp on 0", "apex.amp on 1"]


def test_to_python_float_is_where_both_scalers_are(apex: types.ModuleType) -> None:
    from apex.fp16_utils.loss_scaler import to_python_float

    assert to_python_float(torch.tensor([2.0])) == 2.0


def test_tensors_are_split_by_their_precision(apex: types.ModuleType) -> None:
    tensors = [torch.ones(1), torch.ones(2).half(), torch.ones(3), torch.ones(4).int()]
    split = apex.parallel.distributed.split_half_float_double(tensors)
    assert [[tensor.numel() for tensor in bucket] for bucket in split] == [[2], [1, 3]]
