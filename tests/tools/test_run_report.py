"""``amp-patch run --report``: written however the script ends, by each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import processes
import pytest
from click.testing import CliRunner

from amp_patch.apex.process import environment_of_run
from amp_patch.tools import command_line, run_report

TRAINS = """
import os, sys
import torch
from apex import amp

def train(level, factors):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    for factor in factors:
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 3)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

train("O2", [0.25, float("inf"), 0.25])
if "twice" in sys.argv:
    from amp_patch.amp import deactivate
    deactivate()
    train("O5", [1.0])
if "killed" in sys.argv:
    os.kill(os.getpid(), 9)
if "exits" in sys.argv:
    sys.exit(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path / "report.json"


def run(file: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a fork, with the environment of ``amp-patch run --report``."""
    environment = {**environment_of_run(os.environ, None, report=str(file)), **variables}
    return processes.run([sys.executable, file.with_name("train.py"), *arguments], env=environment)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.parametrize("how", ["", "exits"])
def test_it_says_what_was_trained_when_the_script_ends(file: Path, how: str) -> None:
    done = run(file, how)
    assert done.returncode == (3 if how else 0), done.stderr
    report = read(file)
    (session,) = report["sessions"]
    assert (session["levels"], session["steps"], session["skipped"]) == (["O2"], 3, 1)
    assert session["losses"][0]["scale"] == 2.0**15
    assert (report["rank"], report["world_size"], report["exception"]) == (0, 1, None)
    assert report["began"] <= report["ended"]
    assert report["seconds"] > 0


def test_sessions_that_are_over_are_in_it(file: Path) -> None:
    run(file, "twice")
    found = [(one["levels"], one["steps"]) for one in read(file)["sessions"]]
    assert found == [(["O2"], 3), (["O5"], 1)]


def test_of_a_killed_script_it_says_how_far_it_had_come(file: Path) -> None:
    run(file, "killed")
    report = read(file)
    assert report["ended"] is None
    assert report["sessions"][0]["steps"] >= 1
    assert [path.name for path in file.parent.iterdir() if "part" in path.name] == []


def test_each_rank_has_a_file_and_a_second_process_of_a_rank_too(file: Path) -> None:
    environment = environment_of_run(os.environ, None, report=str(file))
    for rank in ("0", "1", "1"):
        command = [sys.executable, file.with_name("train.py")]
        processes.run(command, env={**environment, "RANK": rank})
    ranks = {path.name: read(path)["rank"] for path in file.parent.glob("*.json")}
    assert ranks == {"report.json": 0, "report-rank1.json": 1, "report-rank1-2.json": 1}


def test_a_report_of_an_earlier_run_is_replaced(file: Path) -> None:
    file.write_text("old")
    os.utime(file, (0, 0))
    run(file)
    assert read(file)["sessions"]
    assert not file.with_name("report-2.json").exists()


def test_a_crash_is_named_by_a_real_process(file: Path) -> None:
    (file.parent / "crash.py").write_text("import json\nraise ValueError('too large')\n")
    file.write_text("old")
    command = [sys.executable, "-m", "amp_patch", "run", "--report", "report.json", "crash.py", "x"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    report = read(file)
    assert report["exception"] == "ValueError: too large"
    assert (report["command"], report["sessions"]) == (["crash.py", "x"], [])
    assert report["torch"] is None


def test_where_a_script_could_write_nothing_no_earlier_report_is_left(file: Path) -> None:
    file.write_text("old")
    file.with_name("dies.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-m", "amp_patch", "run", "--report", "report.json", "dies.py"]
    assert subprocess.run(command, cwd=file.parent).returncode == -9
    assert not file.exists()


def test_a_launcher_leaves_the_report_of_rank_0(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    since = time.time() - 60
    run_report.Report(file, os.getpid(), since).end()
    assert read(file)["sessions"] == []
    file.write_text("of rank 0")
    run_report.Report(file, os.getpid(), since).end()
    assert file.read_text() == "of rank 0"
    run_report.Report(file, os.getpid() + 1, since).end()  # a worker that does not train
    assert file.read_text() == "of rank 0"


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_report.Report(tmp_path / "gone" / "report.json", os.getpid(), 0.0)
    report.write_if_due()
    report.write_if_due()
    said = capsys.readouterr().err
    assert said.startswith("amp-patch: no report in ")
    assert said.count("\n") == 1


def test_a_folder_that_is_not_there_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    arguments = ["run", "--report", str(tmp_path / "gone" / "x.json"), "train.py"]
    result = CliRunner().invoke(command_line.main, arguments, prog_name="amp-patch")
    assert result.exit_code == 2
    assert "--report must name a file in a folder that is there; got" in result.output
