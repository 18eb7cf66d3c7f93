"""The tuner as a command: what it measures, the file it writes, what ends it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forked_run import ForkedRun, write_script
from hypothesis import given
from hypothesis import strategies as st
from support import examples
from torch import nn

from amp_patch.casting.rules import PROFILES
from amp_patch.common import rules_file
from amp_patch.levels import OPT_LEVELS
from amp_patch.step.skip import Skip
from amp_patch.tools.command_line import main
from amp_patch.tools.compare import runs
from amp_patch.tools.launch import python_command
from amp_patch.tools.tune import command, recorder, trials
from amp_patch.tools.tune import outcome as outcomes
from amp_patch.tools.tune.outcome import (
    NO_LOSS,
    Outcome,
    outcome_of_losses,
    outcome_of_output,
    over_ranks,
    progress,
)
from amp_patch.tools.tune.setting import Setting
from amp_patch.tools.warm import WarmPython

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SETTINGS = st.builds(
    Setting,
    st.sampled_from(tuple(OPT_LEVELS)),
    st.dictionaries(TEXT, st.sampled_from(["half", "half_out", "float"])).map(
        lambda d: tuple(d.items())
    ),
    st.lists(TEXT, unique=True).map(tuple),
)


@given(SETTINGS, st.lists(TEXT), TEXT)
@examples(1)
def test_a_file_is_read_as_it_was_meant(tmp_path_factory, setting, head, reason) -> None:
    reasons = {name: [reason] for name in ("opt_level", *setting.floats)}
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(setting.toml(head, reasons), encoding="utf-8")
    found = rules_file.read(path, OPT_LEVELS, PROFILES)
    assert found.opt_level == setting.level
    assert tuple(found.functions.items()) == setting.functions
    assert found.modules == dict.fromkeys(setting.floats, "float")


def steps(*losses: float, skipped: int = 0, optimizer: int = 0) -> list[dict[str, object]]:
    number = len(losses)
    return [
        {"optimizer": optimizer, "loss": loss, "skipped": i >= number - skipped}
        for i, loss in enumerate(losses)
    ]


def test_the_metric_is_the_mean_of_the_last_tenth_for_each_optimizer() -> None:
    lines = [*steps(*range(20)), *steps(*range(100, 120), optimizer=1)]
    assert outcome_of_losses(lines, None).values == (18.5, 118.5)


@pytest.mark.parametrize(
    ("lines", "error", "why"),
    [
        (steps(1.0, float("nan")), None, "not finite"),
        (steps(*[1.0] * 40, skipped=10), None, "10 of the last 20 steps were skipped"),
        (steps(1.0), "ValueError: no", "ValueError: no"),
        ([], None, "--metric 'accuracy"),
    ],
)
def test_a_run_that_cannot_be_used_says_why(lines, error, why: str) -> None:
    outcome = outcome_of_losses(lines, error)
    assert why in (outcome.failure or "")
    assert outcome.deviation(Outcome((1.0,))) == float("inf")


def test_steps_that_are_skipped_while_the_scale_settles_are_no_failure() -> None:
    lines = steps(*[1.0] * 20, skipped=20)[:10] + steps(*[1.0] * 10)
    assert outcome_of_losses(lines, None).failure is None


def test_a_run_that_skipped_steps_may_be_so_many_steps_behind() -> None:
    falling = [float(step) for step in range(100, 0, -1)]
    reference = outcome_of_losses(steps(*falling), None)
    for skipped, deviation in ((5, 0.0), (2, 3 / 7.5), (0, 5 / 5.5), (17, 5 / 5.5)):
        behind = steps(*[100.0] * skipped, skipped=skipped) + steps(*falling[skipped:])
        for line, loss in zip(behind[90:], range(15, 5, -1), strict=True):
            line["loss"] = float(loss)
        outcome = outcome_of_losses(behind, None)
        assert outcome.skipped == (skipped,)
        assert outcome.deviation(reference) == pytest.approx(deviation)


def test_a_number_that_is_printed_is_a_metric() -> None:
    pattern = re.compile(r"accuracy: ([0-9.]+)")
    assert outcome_of_output("accuracy: 0.5\naccuracy: 0.75\n", pattern, None).values == (0.75,)
    missing = outcome_of_output("loss: 3", pattern, None)
    assert "printed nothing that matches" in missing.words()
    assert "is no number" in outcome_of_output("is it", re.compile("it"), None).words()
    optional = re.compile("loss(?:=([0-9]))?")
    assert outcome_of_output("loss=3, and the loss falls", optional, None).values == (3.0,)
    assert "printed nothing" in outcome_of_output("the loss falls", optional, None).words()


@pytest.mark.parametrize(
    ("line", "pattern", "number"),
    [
        ("val: 9.8e-05", "val: ([0-9.]+)", 9.8e-05),
        ("val: 1.3E+04, done", "val: ([0-9.]+)", 1.3e4),
        ("val: 9.8e-05", "val: ([0-9.e]+)", 9.8e-05),
        ("val: 12.75%", "val: ([0-9]+)", 12.75),
        ("val: 12.75", "val: ([0-9])", 12.75),
        ("val: -0.5", "val: .?([0-9.]+)", 0.5),  # whose sign the pattern matches itself
        ("val -0.5", "[0-9.]+", -0.5),
        ("nll=-1.5e2", r"nll=\D?([0-9.]+)e2", 1.5),
        ("top-5 accuracy", "[0-9.]+", 5.0),
        ("epochs 3-0.5", "[0-9.]+$", 0.5),
        ("v2 0.75", "v[0-9] ([0-9.]+)", 0.75),
        ("0.5e5 0.75", "[0-9.]+$", 0.75),
        ("1e-5\n2", "^[0-9]+$", 2.0),
        ("12.3ms", "[0-9.]+", 12.3),
        ("a: 0.93dB", r"a: ([-+.\d]+|nan)", 0.93),
        ("a: -9.8e-05, b", r"a: ([-+.\d]+|nan)", -9.8e-05),
        ("a: 9.8e-05, b", r"a: ([-+.\w]+)", 9.8e-05),
        ("a: -1.5%", r"a: ([-+.\w]+)", -1.5),
    ],
)
def test_a_number_is_read_whole(line: str, pattern: str, number: float) -> None:
    outcome = outcome_of_output(line, re.compile(pattern, re.MULTILINE), None)
    assert outcome.values == (number,)


def test_of_a_long_output_only_the_line_that_matches_is_read_for_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begins = []

    class Noting:
        def finditer(self, text: str, begin: int) -> Any:
            begins.append(text[begin:])
            return number.finditer(text, begin)

    number = outcomes._NUMBER
    monkeypatch.setattr(outcomes, "_NUMBER", Noting())
    text = "step 1 2 3\n" * 3 + "val -9.8e-05 at 4\n"
    assert outcome_of_output(text, re.compile("[0-9.]+(?= at)"), None).values == (-9.8e-05,)
    assert outcome_of_output(text, re.compile("9.8"), None).values == (-9.8e-05,)
    assert begins == ["val -9.8e-05 at 4\n"] * 2


def test_the_pattern_that_is_shown_finds_a_number_that_is_not_finite() -> None:
    (shown,) = re.findall(r"--metric '(.*)'", NO_LOSS)
    (option,) = [one for one in command.command.params if one.name == "metric"]
    assert shown in option.help
    outcome = outcome_of_output("accuracy: 0.5\naccuracy: nan", re.compile(shown), None)
    assert outcome.failure == "it is not finite"


def test_the_deviation_is_the_largest_relative_one_in_either_direction() -> None:
    reference = Outcome((2.0, 4.0))
    assert Outcome((2.0, 3.0)).deviation(reference) == 0.25
    assert Outcome((2.5, 4.0)).deviation(reference) == 0.25
    assert Outcome((0.0,)).deviation(Outcome((0.0,))) == 0
    near_0 = outcome_of_losses(steps(*[1.0] * 20, *[1e-5] * 20), None)
    again = outcome_of_losses(steps(*[1.0] * 20, *[2e-5] * 20), None)
    assert again.deviation(near_0) < 1e-3
    assert progress(steps(2.0, 1.0)) == 0.5


def test_a_metric_of_several_processes_is_their_mean_and_a_skip_that_of_any() -> None:
    first, second = steps(1.0, 2.0, 3.0), steps(3.0, 4.0, float("nan"), skipped=1)
    found = over_ranks([first, second])
    assert [one["loss"] for one in found[:2]] == [2.0, 3.0]
    assert [one["skipped"] for one in found] == [False, False, True]
    assert outcome_of_losses(found, None).failure == "the loss is not finite"
    assert over_ranks([first]) == first
    without = [{"optimizer": 0, "loss": None, "skipped": False}]
    assert over_ranks([without, without]) == without


@pytest.mark.parametrize(("given", "share"), [("1%", 0.01), ("0.05", 0.05), ("2.5%", 0.025)])
def test_the_tolerance_is_a_share_as_of_a_sweep(tmp_path, monkeypatch, given, share) -> None:
    seen = []
    monkeypatch.setattr(
        command, "Search", lambda trials, levels, tolerance, say: seen.append(tolerance) or 1 / 0
    )
    tuned("--tolerance", given, "--out", str(tmp_path / "rules.toml"), "--", __file__)
    assert seen == [share]


@pytest.fixture
def forked(monkeypatch) -> None:
    monkeypatch.setattr(runs, "ScriptRun", ForkedRun)
    monkeypatch.setattr(trials, "ScriptRun", ForkedRun)


def tuned(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["tune", *arguments], prog_name="amp-patch")
    return result.exit_code, result.output


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])
def test_the_module_that_overflows_is_mended_and_the_rest_stays_in_half(
    tmp_path: Path, level: str
) -> None:
    out = tmp_path / "rules.toml"
    options = ["--levels", level, "--steps", "12", "--tolerance", "0.05", "--out", str(out)]
    code, output = tuned(*options, "--", write_script(tmp_path))
    assert code == 0, output
    found = rules_file.read(out, OPT_LEVELS, PROFILES)
    assert (found.opt_level, found.modules) == (level, {"2": "float"})
    assert "mul makes inf or NaN here" in out.read_text()
    assert "Verified by a run with it" in output
    assert max(map(len, re.findall("^# .*", out.read_text(), re.MULTILINE))) < 300


@pytest.mark.usefixtures("forked")
def test_what_is_found_when_the_budget_is_over_is_written(tmp_path: Path) -> None:
    out = tmp_path / "rules.toml"
    code, output = tuned("--budget", "0.0001", "--out", str(out), "--", write_script(tmp_path))
    assert code == 0, output
    assert rules_file.read(out, OPT_LEVELS, PROFILES).opt_level == "O0"
    assert "the budget was used up" in out.read_text()


def test_without_o0_and_without_a_result_no_file_is_written(tmp_path: Path, monkeypatch) -> None:
    def metric(self, setting):
        raise trials.OutOfBudget

    monkeypatch.setattr(trials.ScriptTrials, "metric", metric)
    out = tmp_path / "rules.toml"
    options = ["--levels", "O1,O2", "--budget", "1", "--out", str(out)]
    code, output = tuned(*options, "--", write_script(tmp_path))
    assert code == 1
    assert "no setting of O1 and O2 is known to keep the metric" in output
    assert "the budget was used up" in output
    assert not out.exists()


@pytest.mark.usefixtures("forked")
def test_a_script_that_fails_in_fp32_is_told_of(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "rules.toml"
    path.write_text("from amp_patch import amp\nundefined")
    code, output = tuned("--out", str(out), "--", str(path))
    assert code == 1
    assert "fp32 cannot be measured: NameError: name 'undefined' is not defined" in output
    assert not out.exists()


@pytest.mark.usefixtures("forked")
def test_a_script_that_steps_nothing_is_told_the_mend(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from torch import nn\nfrom amp_patch import amp\namp.initialize(nn.Linear(2, 2))"
    )
    code, output = tuned("--out", str(tmp_path / "rules.toml"), "--", str(path))
    assert code == 1
    assert "the script stepped no optimizer that it had given to amp.initialize; " in output
    assert "give amp.initialize the optimizer that is stepped, in model, optimizer = " in output


@pytest.mark.usefixtures("forked")
def test_a_script_that_changes_its_folder_is_verified_with_the_file(
    tmp_path: Path, monkeypatch
) -> None:
    script, elsewhere = Path(write_script(tmp_path)), tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{script.read_text()}")
    monkeypatch.chdir(tmp_path)
    Path("rules.toml").write_text('opt_level = "O0"\n')
    asked = trials.Script(python_command([str(script)]), 10, None, 0)
    runner = trials.ScriptTrials(asked, tmp_path / "runs", None)
    (tmp_path / "runs").mkdir()
    assert runner.verify(Path("rules.toml")).failure is None


def test_a_file_that_a_run_fails_with_is_told_with_the_error(tmp_path: Path, monkeypatch) -> None:
    outcomes = iter([Outcome((1.0,)), Outcome((1.0,)), Outcome(failure="OSError: no disk")])
    monkeypatch.setattr(trials.ScriptTrials, "metric", lambda self, setting: next(outcomes))
    monkeypatch.setattr(trials.ScriptTrials, "seconds", lambda self, setting: 1.0)
    options = ["--levels", "O0", "--out", str(tmp_path / "rules.toml")]
    code, output = tuned(*options, "--", write_script(tmp_path))
    assert code == 1
    assert "A run with it failed: OSError: no disk." in output


def test_a_run_that_spoils_its_buffers_is_of_no_use_but_where_fp32_does_it_too(
    tmp_path: Path, monkeypatch
) -> None:
    written = []
    monkeypatch.setattr(trials.ScriptTrials, "_run", lambda self, setting, timed: (tmp_path, None))
    runner = trials.ScriptTrials(trials.Script(["x.py"], None), tmp_path, None)
    steps = types.SimpleNamespace(write=written.append)

    def metric(level: str, mean: float) -> Outcome:
        written.clear()
        losses = recorder.Losses(steps)
        model = nn.BatchNorm1d(2)
        losses.prepared([model])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.scaled(torch.ones(()), 1.0, 0, [optimizer])
        losses.stepped(optimizer, Skip(print))
        model.running_mean.fill_(mean)
        losses.look_at_buffers()
        lines = "".join(json.dumps(line) + "\n" for line in written)
        (tmp_path / "steps-rank0.jsonl").write_text(lines, encoding="utf-8")
        return runner.metric(Setting(level))

    assert metric("O0", 1.0) == metric("O3", 1.0)
    found = metric("O3", float("inf"))
    assert found.failure == (
        "running_mean of the model itself (BatchNorm1d) holds inf, in float32, and evaluations "
        "with it are wrong"
    )
    metric("O0", float("inf"))
    assert metric("O3", float("inf")).failure is None


def test_buffers_are_looked_at_when_the_script_ends_by_itself(monkeypatch) -> None:
    at_end: list[Any] = []
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(recorder, "at_end", at_end.append)
    losses = recorder.Losses(types.SimpleNamespace(write=written.append))
    model = nn.BatchNorm1d(2)
    losses.prepared([model])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        losses.stepped(optimizer, Skip(print))
    model.running_var.fill_(float("nan"))
    (end,) = at_end
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    end()
    assert [one for one in written if "spoiled" in one] == []
    monkeypatch.setattr(sys, "last_value", None)
    end()
    assert len([one for one in written if "spoiled" in one]) == 1


@pytest.mark.parametrize("warm_loss", [1.0, 1.1])
def test_warm_runs_are_taken_where_they_repeat_the_first_one(
    tmp_path: Path, monkeypatch, warm_loss: float
) -> None:
    started = []

    def metric(self, setting):
        started.append("warm" if self._warm and self._first else "cold")
        return Outcome((warm_loss if started[-1] == "warm" else 1.0,))

    monkeypatch.setattr(trials.ScriptTrials, "_metric", metric)
    script = trials.Script(["x.py"], None)
    runner = trials.ScriptTrials(script, tmp_path, None, WarmPython({}))
    assert [runner.metric(Setting("O0")).values for _ in range(3)] == [(1.0,)] * 3
    runner.verify(tmp_path)
    repeats = warm_loss == 1.0
    assert started == (["cold", *["warm"] * 2] if repeats else ["cold", "warm", *["cold"] * 2]) + [
        "cold"
    ]


@pytest.mark.parametrize(("ranks", "ends"), [("1", True), ("2", False)])
def test_a_timed_run_ends_when_its_time_is_known(monkeypatch, ranks: str, ends: bool) -> None:
    monkeypatch.setattr(recorder, "TIMED_STEPS", 3)
    monkeypatch.setattr(recorder, "TIMED_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    lines: list[object] = []
    clock = recorder.Clock(types.SimpleNamespace(write=lines.append))
    with pytest.raises(SystemExit) if ends else contextlib.nullcontext():
        for _ in range(5):
            clock.stepped(None, None)
    assert len(lines) == (3 if ends else 5)


def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path, monkeypatch) -> None:
    outcomes = iter([Outcome((1.0,)), Outcome((1.0,))])

    def metric(self, setting):
        try:
            return next(outcomes)
        except StopIteration:
            raise KeyboardInterrupt from None

    times = {"O0": 2.0, "O1": 1.0}
    monkeypatch.setattr(trials.ScriptTrials, "metric", metric)
    monkeypatch.setattr(trials.ScriptTrials, "seconds", lambda self, one: times[one.level])
    out = tmp_path / "rules.toml"
    options = ["--levels", "O0,O1", "--out", str(out)]
    code, _ = tuned(*options, "--", write_script(tmp_path))
    assert code == 130
    assert rules_file.read(out, OPT_LEVELS, PROFILES).opt_level == "O0"
    assert "it was interrupted" in out.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x/y"],
        ["--out", "r.toml", "--", "missing.py"],
        ["--metric", "(", "--out", "r.toml", "--", __file__],
        ["--metric", "(a)(b)", "--out", "r.toml", "--", __file__],
        ["--levels", "O7", "--out", "r.toml", "--", __file__],
        ["--tolerance", "0", "--out", "r.toml", "--", __file__],
        ["--tolerance", "0%", "--out", "r.toml", "--", __file__],
        ["--tolerance", "nan", "--out", "r.toml", "--", __file__],
        ["--tolerance", "inf", "--out", "r.toml", "--", __file__],
        ["--tolerance", "-1%", "--out", "r.toml", "--", __file__],
        ["--budget", "nan", "--out", "r.toml", "--", __file__],
        ["--budget", "inf", "--out", "r.toml", "--", __file__],
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = tuned(*arguments)
    assert code == 2
    assert output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_what_is_so(amp, tmp_path: Path, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tune.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "docs/tune.md", "exec"), {})
    (file,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "shown.toml"
    path.write_text(file)
    assert rules_file.read(path, OPT_LEVELS, PROFILES).modules == {"blocks.2.proj": "float"}
