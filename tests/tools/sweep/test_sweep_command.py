"""``amp-patch sweep`` and `amp_patch.sweep` as they are called, from the script to the files."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forked_run import ForkedRun
from sweeps import eventful, files_in, made_run

import amp_patch
from amp_patch.tools import command_line, launch
from amp_patch.tools.errors import BadArguments
from amp_patch.tools.sweep import function, runs, sweep
from amp_patch.tools.sweep.settings import Settings
from amp_patch.tools.sweep.sweep import Sweep
from amp_patch.tools.untrained import REASONS

DOCS = Path(__file__).parents[3] / "docs" / "sweep.md"
COMMAND = [sys.executable, "-m", "amp_patch", "sweep"]
FILES = {
    "sweep.json",
    "levels.csv",
    "levels.md",
    "steps.csv",
    "report.html",
    "loss.png",
    "speed.png",
    "memory.png",
    "loss_scale.png",
    "overview.png",
}

# Written for apex. Its level is O0, and is overridden; at O1 the loss becomes NaN, at O2 it raises.
TROUBLED = """
    import os, sys
    import torch
    from apex import amp
    assert sys.argv[1:] == ["--out", "mine", "--levels", "3"]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
    level = os.environ["AMP_PATCH_OPT_LEVEL"]
    inputs, targets = torch.randn(64, 8), torch.randint(2, (64,))
    for step in range(1, 21):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        if level == "O1" and step > 5:
            loss = loss * float("nan")
        if level == "O2" and step == 8:
            raise RuntimeError("no room")
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
"""
TROUBLED_ARGUMENTS = ["--out", "mine", "--levels", "3"]


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Draw nothing: that takes seconds, and has tests of its own."""
    monkeypatch.setattr(Sweep, "_draw", lambda *results: None)


def called(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(
        command_line.main, ["sweep", *map(str, arguments)], prog_name="amp-patch"
    )
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Go to a folder with the script, and with a home of its own."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TROUBLED))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_for_apex_is_swept_from_end_to_end(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "ScriptRun", ForkedRun)
    words = ["--out", "out", "--levels", "O0,O1,O2", "--", "train.py", *TROUBLED_ARGUMENTS]
    code, output = called(*words)
    assert code == 0, output
    found = json.loads((folder / "out" / "sweep.json").read_text())
    verdicts = [(row["verdict"], row["verdict_step"]) for row in found["levels"]]
    assert verdicts == [("ok", None), ("diverged", 6), ("crashed", 7)]
    assert found["levels"][2]["reason"] == "RuntimeError: no room (train.py, line 16)"
    assert found["levels"][1]["culprits"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert found["recommendation"]["level"] == "O0"
    listed = re.search(r"\| `machine` \| (.*) \|", DOCS.read_text())
    assert list(found["machine"]) == re.findall(r"`(\w+)`", listed[1])
    # the activations are half, the weights are not
    assert 0 < found["levels"][1]["memory"] < found["levels"][0]["memory"]
    written = {name for name in files_in(folder) if not name.startswith("out/runs/")}
    assert written == {"train.py", *(f"out/{name}" for name in FILES)}
    assert max(map(len, output.splitlines())) <= 60
    assert "diverged at step 6" in output


@pytest.mark.slow(instead="the same script in forks")
def test_a_script_is_swept_in_processes_of_its_own(folder: Path) -> None:
    words = ["--out", "out", "--levels", "O0,O1,O2", "--", "train.py", *TROUBLED_ARGUMENTS]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((folder / "out" / "sweep.json").read_text())
    assert [row["verdict"] for row in found["levels"]] == ["ok", "diverged", "crashed"]
    written = {name for name in files_in(folder) if not name.startswith("out/runs/")}
    assert written == {"train.py", *(f"out/{name}" for name in FILES)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a script must stand after --"),
        (["--", "missing.py"], "missing.py"),
        (["--levels", "O7", "--", __file__], "'O7' is not one of"),
        (["--steps", "0", "--", __file__], "--steps"),
        (["--repeat", "x", "--", __file__], "--repeat"),
        (["--tolerance", "much", "--", __file__], "neither a share like 0.05 nor one like 5%"),
        (["--tolerance", "nan", "--", __file__], "neither a share"),
        (["--tolerance", "-1%", "--", __file__], "neither a share"),
        (["--seed", "-1", "--", __file__], "--seed"),
        (["--tolerance", "5", "--", __file__], "'5' is 500%, for a share of 1 is all of it"),
        (["--timeout", "-1", "--", __file__], "--timeout"),
        (["--timeout", "nan", "--", __file__], "--timeout"),
        (["--timeout", "inf", "--", __file__], "--timeout"),
        (["--out", f"{__file__}/a", "--", __file__], "folder to write to"),
        (["--resume", "nowhere"], "must hold a sweep; got nowhere, in which there is no"),
        (["--resume", "a", "--out", "b"], "got --out too"),
    ],
)
def test_bad_arguments_are_told_in_one_line(arguments: list[str], words: str) -> None:
    code, output = called(*arguments)
    assert code == 2
    assert words in output
    assert output.count("\n") == 1


def test_a_folder_that_holds_a_sweep_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    code, output = called("--out", tmp_path, "--", __file__)
    assert code == 2
    assert f"--resume {tmp_path}" in output
    assert (tmp_path / "sweep.json").read_text() == "{}"


def test_two_sweeps_that_begin_at_once_have_a_folder_each(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "writable_folder", lambda folder: folder)  # too late for it
    folders = [sweep.begun(None, Settings(["x"]), ["x"]).folder for _ in range(2)]
    assert folders == [Path("amp-sweep"), Path("amp-sweep-2")]


def test_a_folder_is_kept_until_its_sweep_has_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep.files, "load", lambda folder: (Settings(["x"]), "", []))
    monkeypatch.setattr(Sweep, "_run", lambda self, console: console)
    first = sweep.begun(tmp_path, Settings(["x"]), ["x"])
    for another in (
        lambda: sweep.begun(tmp_path, Settings(["x"]), ["x"]),
        lambda: sweep.resumed(tmp_path, {}, lambda *given: []),
    ):
        with pytest.raises(BadArguments, match="one sweep at a time; got .*, in which another"):
            another()
    first.run()
    assert sweep.resumed(tmp_path, {}, lambda *given: []).run() is not None


def test_a_sweep_that_goes_on_elsewhere_is_told_where_to(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep.files, "load", lambda folder: (Settings(["train.py"]), "", []))
    code, output = called("--resume", tmp_path)
    assert (code, output.count("\n")) == (2, 1)
    assert "where its command, train.py, is not found; go to that folder" in output


@pytest.mark.parametrize("package", ["rich", "matplotlib", "plotly"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, package: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == package else real(name)
    )
    code, output = called("--", __file__)
    assert code == 2
    assert output.endswith(f"needs {package}; call pip install 'amp_patch[sweep]'\n")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("share", "number"), [("0.01", 0.01), ("5%", 0.05), ("0", 0.0)])
def test_the_tolerance_is_a_share(tmp_path: Path, monkeypatch, share: str, number: float) -> None:
    monkeypatch.setattr(runs.Runner, "run", lambda self, kept: eventful())
    code, _ = called("--tolerance", share, "--out", tmp_path / "new", "--", __file__)
    assert code == 0
    settings = json.loads((tmp_path / "new" / "sweep.json").read_text())["settings"]
    assert settings["tolerance"] == number


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("ends", "expected"), [("finished", 0), ("crashed", 1), ("interrupted", 130)]
)
def test_the_exit_code_says_how_it_went(
    tmp_path: Path, monkeypatch, ends: str, expected: int
) -> None:
    def run(self, kept):
        found = [one for one in eventful() if one.outcome.kind == "crashed" or ends != "crashed"]
        self.interrupted = 130 if ends == "interrupted" else 0
        return found

    monkeypatch.setattr(runs.Runner, "run", run)
    code, output = called("--out", tmp_path / "new", "--", __file__)
    assert code == expected
    assert ("--resume" in output) is (ends == "interrupted")


@pytest.mark.usefixtures("undrawn")
def test_a_script_that_trains_without_amp_is_told_of_with_the_mend(tmp_path, monkeypatch) -> None:
    def run(self, kept):
        self.is_futile = True
        return [made_run("O0", [], outcome="no steps", reason=REASONS["no"]),
                made_run("O1", [], outcome="not run")]  # fmt: skip

    monkeypatch.setattr(runs.Runner, "run", run)
    code, output = called("--out", tmp_path / "new", "--", __file__)
    assert code == 1
    words = " ".join(output.split())
    assert f"O0: no steps: {REASONS['no']}." in words
    assert "; call model, optimizer = amp.initialize(" in words
    assert "No other level was run." in words


@pytest.mark.usefixtures("undrawn")
def test_brackets_in_what_a_script_printed_are_shown_as_they_are(tmp_path, monkeypatch) -> None:
    reason = "RuntimeError: [/gloo/pair.cc:553] closed by [bold]peer[/bold] :fire:"
    found = [made_run("O0", [], outcome="crashed", reason=reason)]
    monkeypatch.setattr(runs.Runner, "run", lambda self, kept: found)
    code, output = called("--out", tmp_path / "[red]", "--", __file__)
    assert code == 1
    assert f"O0: crashed: {reason}." in " ".join(output.split())
    assert "[red]/runs/O0-round1/log.txt\n" in output
    assert "[red]/report.html" in output


def train() -> None:
    """Stand for a training that takes no level."""


def train_at(opt_level: str) -> None:
    (Path(os.environ["MARK"])).write_text(opt_level)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (train, False),
        (train_at, True),
        (functools.partial(train_at, "O1"), False),
        (lambda opt_level="O1": None, False),
    ],
)
def test_a_function_gets_the_level_where_it_needs_one(given, expected: bool) -> None:
    assert function._takes_level(given) is expected


@pytest.mark.parametrize("given", [None, 3, lambda a, b: None])
def test_what_is_no_training_function_is_refused(given) -> None:
    with pytest.raises(TypeError, match="train_fn must"):
        amp_patch.sweep(given)


def test_the_path_of_a_script_is_told_of_the_command() -> None:
    with pytest.raises(TypeError, match=r"for a script call amp-patch sweep -- 'a b/train\.py'$"):
        amp_patch.sweep(Path("a b/train.py"))


async def later() -> None:
    """Train when it is awaited."""


def bit_by_bit():
    yield


@pytest.mark.parametrize(
    ("given", "mend"),
    [
        (later, "a coroutine function; call amp_patch.sweep(lambda: asyncio.run(later()))."),
        (bit_by_bit, "a generator function; call amp_patch.sweep(lambda: list(bit_by_bit()))."),
        (functools.partial(print, sys.stdout), "make what cannot be sent, as a lock or an open"),
    ],
)
def test_what_would_train_nothing_or_cannot_be_sent_is_refused(tmp_path, given, mend: str) -> None:
    with pytest.raises(TypeError, match="train_fn") as raised:
        amp_patch.sweep(given, out=tmp_path / "new")
    assert mend in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"levels": ["O9"]}, "levels must be some of O0"),
        ({"levels": []}, "levels must be some of O0"),
        ({"levels": None}, "levels must be some of O0.*; got None"),
        ({"levels": np.array([0, 1])}, "levels must be some of O0.*; got array"),
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"steps": "10"}, "steps must be a whole number of at least 1; got '10'"),
        ({"steps": True}, "steps must be a whole number of at least 1; got True"),
        ({"repeat": 0}, "repeat must be a whole number of at least 1; got 0"),
        ({"repeat": 1.5}, "repeat must be a whole number of at least 1; got 1.5"),
        ({"seed": None}, "seed must be a whole number of at least 0; got None"),
        ({"seed": 2**32}, "seed must be below 2.*32, for NumPy takes no other; got 4294967296"),
        ({"tolerance": -1}, "tolerance must be a share .*; got -1; call .*tolerance=0.05"),
        ({"tolerance": "5%"}, "tolerance must be a share .*; got '5%'; call .*tolerance=0.05"),
        ({"tolerance": 5}, "tolerance must be a share .*; got 5; call .*tolerance=0.05"),
        ({"tolerance": float("nan")}, "tolerance must be a share .*; got nan"),
        ({"tolerance": np.zeros(2)}, "tolerance must be a share .*; got array"),
        ({"timeout": 0}, "timeout must be seconds above 0, or None for no limit; got 0"),
        ({"resume": "nowhere"}, "the folder to go on in must hold a sweep; got nowhere"),
        ({"resume": "a", "out": "b"}, "^resume writes to its own folder; got out too"),
    ],
)
def test_bad_options_of_the_call_are_value_errors(options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        amp_patch.sweep(train, **options)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [np.array, tuple, set, iter, ", ".join])
def test_options_may_come_in_any_container_and_number(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(runs.Runner, "run", lambda self, kept: eventful())
    options = {"steps": np.int64(5), "seed": torch.tensor(3), "repeat": np.array(2)}
    shares = {"tolerance": torch.tensor(0.25), "timeout": np.float32(60.0)}
    out = os.fsencode(tmp_path / "out")
    amp_patch.sweep(train, out=out, levels=kind(["O0", "O4"]), **options, **shares)
    settings = json.loads((tmp_path / "out" / "sweep.json").read_text())["settings"]
    assert settings["levels"] == ["O0", "O4"]
    assert [settings[name] for name in (*options, *shares)] == [5, 3, 2, 0.25, 60.0]


def test_a_sweep_inside_of_a_sweep_is_refused(monkeypatch) -> None:
    monkeypatch.setenv(launch.TOOL, "x:y")
    with pytest.raises(RuntimeError, match="by the training that it sweeps"):
        amp_patch.sweep(train)


@pytest.mark.usefixtures("undrawn")
def test_the_function_is_called_in_its_process(tmp_path: Path, monkeypatch) -> None:
    """The runs are made here, by what the process would call."""
    commands = []

    def run(self, kept):
        commands.append(list(self.command))
        monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O4")
        monkeypatch.setenv("MARK", str(tmp_path / "mark"))
        monkeypatch.setattr(sys, "path", list(sys.path))
        function.call(self.command[-1])
        return eventful()

    monkeypatch.setattr(runs.Runner, "run", run)
    result = amp_patch.sweep(train_at, levels=["O4"], out=tmp_path / "out", steps=5)
    assert (tmp_path / "mark").read_text() == "O4"
    assert commands[0][1:3] == ["-m", "amp_patch.tools.sweep.function"]
    assert result.recommendation.level == "O1"
    assert result.folder == tmp_path / "out"
    assert repr(result).startswith("<Result of a sweep: O0 ok, O1 ok, ")
    assert "Step(" not in repr(result)
    assert not list((tmp_path / "out").glob("*.pickle"))
    settings = json.loads((tmp_path / "out" / "sweep.json").read_text())["settings"]
    assert (settings["command"], settings["steps"]) == (["train_at"], 5)


@pytest.mark.usefixtures("undrawn")
def test_an_interruption_goes_on_to_the_caller(tmp_path: Path, monkeypatch, capsys) -> None:
    def run(self, kept):
        self.interrupted = 130
        return eventful()

    monkeypatch.setattr(runs.Runner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        amp_patch.sweep(train, out=tmp_path / "out")
    assert (tmp_path / "out" / "levels.csv").exists()
    assert (
        f"To go on: amp_patch.sweep(train, resume='{tmp_path / 'out'}')" in capsys.readouterr().out
    )
    call = re.escape(f"call amp_patch.sweep(train, resume='{tmp_path / 'out'}') to go on")
    with pytest.raises(ValueError, match=f"new sweep must not hold one; .*{call}"):
        amp_patch.sweep(train, out=tmp_path / "out")


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_of_a_function_goes_on_with_the_options_that_it_has(tmp_path, monkeypatch) -> None:
    swept = []

    def run(self, kept):
        swept.append(self.settings)
        return eventful()

    monkeypatch.setattr(runs.Runner, "run", run)
    options = {"levels": ["O0", "O4"], "steps": 5, "repeat": 2, "tolerance": 0.1, "seed": 3}
    amp_patch.sweep(train, out=tmp_path, timeout=60, **options)
    amp_patch.sweep(train, resume=tmp_path)
    assert swept[0] == swept[1]
    amp_patch.sweep(train, resume=tmp_path, levels=["O5"], repeat=3)
    assert swept[2] == replace(swept[0], levels=["O5"], repeat=3)
    with pytest.raises(ValueError, match="must keep its steps, 5; got 6; leave it out"):
        amp_patch.sweep(train, resume=tmp_path, steps=6)


@pytest.mark.usefixtures("undrawn")
def test_what_goes_on_with_a_sweep_is_what_began_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runs.Runner, "run", lambda self, kept: eventful())
    amp_patch.sweep(train, out=tmp_path / "a")
    code, output = called("--resume", tmp_path / "a")
    assert code == 2
    assert output.endswith(f"of train; call amp_patch.sweep(train, resume='{tmp_path / 'a'}')\n")
    called("--out", tmp_path / "b", "--", __file__)
    with pytest.raises(ValueError, match=f"call amp-patch sweep --resume {tmp_path / 'b'}"):
        amp_patch.sweep(train, resume=tmp_path / "b")
    with pytest.raises(ValueError, match="keep its function or script, train; got train_at; call"):
        amp_patch.sweep(train_at, resume=tmp_path / "a")


def test_the_snippet_on_the_page_trains(amp) -> None:
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.M | re.S
    )
    namespace = {"__name__": "docs"}
    exec(compile(snippet, str(DOCS), "exec"), namespace)
    namespace["train"]()
    assert amp.loss_scale() > 1


FUNCTION = """
    import torch, amp_patch
    from amp_patch import amp
    steps = 12
    def train():
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, verbosity=0)
        for _ in range(steps):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(3, 4)).square().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
    result = amp_patch.sweep(train, levels=["O0", "O4"], out="out")
    assert [row.steps for row in result.comparison.rows] == [12, 12]
    print("all is well")
"""


@pytest.mark.slow(instead="what is made of the function")
def test_a_function_of_the_main_module_is_swept(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(textwrap.dedent(FUNCTION))
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("all is well\n"), done.stderr


RANKS = """
    import torch
    import torch.distributed
    from amp_patch import amp
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer)
    for step in range(1, 9):
        inputs = torch.ones(3, 4)
        if step == 5 and torch.distributed.get_rank() == 1:
            inputs[0] = float("inf")
        optimizer.zero_grad()
        with amp.scale_loss(model(inputs).square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow(instead="what is made of the ranks' files")
def test_ranks_of_torchrun_are_recorded_each(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RANKS))
    words = ["torchrun", "--standalone", "--nproc_per_node", "2", script]
    code, output = called("--out", tmp_path / "out", "--levels", "O1", "--", *words)
    assert code == 0, output
    (row,) = json.loads((tmp_path / "out" / "sweep.json").read_text())["levels"]
    assert (row["steps"], row["skipped"], row["unlike_skips"]) == (8, 0, [5])
    assert "some ranks skipped steps that others made: 5." in " ".join(output.split())
