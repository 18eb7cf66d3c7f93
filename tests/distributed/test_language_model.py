"""The example for several GPUs: each engine trains what one process trains, at any level."""

import importlib
import re
from pathlib import Path

import pytest
import ranks
from support import nightly_but

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = "distributed_language_model"
RUNS = [
    (engine, level)
    for engine in ("ddp", "fsdp2", "tensor", "pipeline")
    for level in ("O0", "O1", "O2", "O4", "O5")
]
#: Of the losses, relative: those of the half dtypes drift apart as the training goes on.
TOLERANCE = {"O0": 1e-4, "O1": 0.01, "O2": 0.01, "O4": 0.05, "O5": 0.05}


def train(engine: str, level: str, steps: int) -> list[float]:
    losses: list[float] = importlib.import_module(SCRIPT).train(engine, level, steps)
    return losses


@pytest.mark.parametrize(("run"), nightly_but([("ddp", "O2")], RUNS), ids="-".join)
def test_two_ranks_train_what_one_process_trains(
    run: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    engine, level = run
    (alone,) = ranks.run(train, "ddp", level, 20, size=1)
    first, second = ranks.run(train, engine, level, 20, size=2)
    assert first == second
    assert first[-1] < 0.7 * first[0]
    assert first == pytest.approx(alone, rel=TOLERANCE[level])


@pytest.mark.slow(instead="ranks that are forks, by DDP at O2")
@pytest.mark.parametrize(
    ("engine", "size"), [("ddp", 2), ("fsdp2", 2), ("tensor", 4), ("pipeline", 2)]
)
def test_the_script_runs_under_torchrun(engine: str, size: int) -> None:
    script = [EXAMPLES / f"{SCRIPT}.py", "--engine", engine, "--opt-level", "O2", "--steps", 60]
    code, output, errors = ranks.torchrun(f"--nproc_per_node={size}", *script)
    assert code == 0, errors
    assert re.fullmatch(rf"{engine}, O2: loss [45]\.\d+ -> [23]\.\d+\n", output)
