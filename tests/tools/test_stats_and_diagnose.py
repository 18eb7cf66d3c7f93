"""``amp-patch stats`` and ``amp-patch diagnose`` over scripts, which run in forks here."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from forked_run import ForkedRun
from pages import DOCS, snippets, text_of
from support import nightly_but

from amp_patch.tools import diagnose, observed
from amp_patch.tools import stats as op_report
from amp_patch.tools.command_line import main
from amp_patch.tools.observed import Observed

SCRIPT = """
    import sys, torch
    from torch import nn
    {imported}

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            q, k = self.q(x) + float(sys.argv[1]), self.k(x) + float(sys.argv[1])
            return torch.softmax(q @ k.t(), -1) @ x

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Scores(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=16.0)
        for step in range(8):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()

    train()
    {last}
"""


@pytest.fixture(autouse=True)
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "ScriptRun", ForkedRun)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def called(
    *arguments: str, value: str = "0", imported: str = "from amp_patch import amp", last: str = ""
) -> Result:
    Path("train.py").write_text(textwrap.dedent(SCRIPT.format(imported=imported, last=last)))
    return CliRunner().invoke(main, [*arguments, "--", "train.py", value], prog_name="amp-patch")


@pytest.mark.parametrize("imported", ["from amp_patch import amp", "from apex import amp"])
def test_diagnose_names_module_and_operator(imported: str) -> None:
    result = called("diagnose", "--steps", "3", "--out", "found", value="300", imported=imported)
    assert result.exit_code == 0, result.output
    assert "3 of 3 steps overflowed." in result.output
    title = "Sequential: `1`: `matmul` returned inf, in forward"
    assert f"3 of 3, first in step 1: {title}" in result.output
    found = json.loads(Path("found/diagnose.json").read_text())
    (cause,) = found["causes"]
    assert (cause["module"], cause["operator"], cause["count"]) == ("1", "matmul", 3)
    assert f"  line: {cause['line']}\n" in result.output
    assert cause["line"].startswith("train.py:")
    assert sorted(path.name for path in Path().iterdir()) == ["found", "train.py"]


def test_the_samples_of_the_page_are_of_the_script_that_it_names() -> None:
    _, _, script = next(snippets(DOCS / "compare.md"))
    Path("train.py").write_text(script)
    arguments = ["diagnose", "--steps", "5", "--", "train.py"]
    printed = CliRunner().invoke(main, arguments, prog_name="amp-patch").output
    page = text_of(DOCS / "diagnose.md")
    for words in (r"^5 of 5.*$", r"^  line: .*$", r"`\d`: \d+ of (\d+) values inf or NaN"):
        shown = re.findall(words, page, re.M)
        assert shown
        assert shown == re.findall(words, printed, re.M)


def test_steps_that_are_skipped_for_want_of_zero_grad_are_told() -> None:
    script = textwrap.dedent(SCRIPT.format(imported="from amp_patch import amp", last=""))
    clear, mean = "optimizer.zero_grad()", "mean()"
    assert script.count(clear) == script.count(mean) == 1
    script = script.replace(clear, "pass").replace(mean, "mean() / (step != 0)")
    Path("train.py").write_text(script)
    arguments = ["diagnose", "--steps", "6", "--out", "found", "--", "train.py", "0"]
    CliRunner().invoke(main, arguments, prog_name="amp-patch")
    found = json.loads(Path("found/diagnose.json").read_text())
    assert (found["overflowed_steps"], found["uncleared_steps"]) == (1, 5)


def test_what_is_not_cleared_is_told_once_below_the_first_line() -> None:
    lines = diagnose.report(a_report(overflows=1, overflowed_steps=1, uncleared_steps=3), ["x"])
    first, second = lines.splitlines()[:2]
    assert first == "1 of 4 steps overflowed."
    assert second.startswith("3 more were skipped, for the gradients of a skipped step were not")
    one = diagnose.report(a_report(uncleared_steps=1), ["x"])
    assert "1 more was skipped" in one


def test_the_lines_for_a_rules_file_mend_what_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = called("diagnose", "--steps", "3", value="300")
    lines = result.output.splitlines()
    start = lines.index("  [modules]")
    assert lines[start + 1 : start + 3] == [
        '  "1" = "float"',
        "and amp-patch run --rules rules.toml train.py 300",
    ]
    Path("rules.toml").write_text("\n".join(lines[start : start + 2]))
    monkeypatch.setenv("AMP_PATCH_RULES", "rules.toml")
    result = called("diagnose", "--steps", "3", value="300")
    assert result.output.startswith("Nothing overflowed in 3 steps. "), result.output


def test_a_launcher_gets_the_rules_by_the_environment() -> None:
    cause = a_cause(rule={"1:blocks.2": "float"})
    found = a_report(overflows=1, overflowed_steps=1, causes=[cause])
    text = diagnose.report(found, ["torchrun", "--nproc_per_node", "2", "train.py"])
    assert '  "1:blocks.2" = "float"\n' in text
    assert "and AMP_PATCH_RULES=rules.toml torchrun --nproc_per_node 2 train.py" in text


@pytest.mark.parametrize("is_part", [True, False])
def test_rules_that_do_not_mend_each_step_are_said_to_be_so(is_part: bool) -> None:
    causes = [a_cause(rule={"a": "float"}, is_mended_in_part=is_part)]
    text = diagnose.report(a_report(overflows=3, overflowed_steps=3, causes=causes), ["train.py"])
    assert ("script, in the steps that are said to be mended so, by these" in text) is is_part


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (["a", "a.b", "ab"], ["a", "ab"]),
        (["1:2", "1:", "0:2", "11:2"], ["1:", "0:2", "11:2"]),
        (["a", "", "b.c"], [""]),
    ],
)
def test_no_rule_is_told_of_what_is_inside_of_what_has_one(found, told) -> None:
    causes = [a_cause(rule={one: "float"}) for one in found]
    text = diagnose.report(a_report(overflows=3, overflowed_steps=3, causes=causes), ["train.py"])
    lines = [line.strip() for line in text.splitlines() if line.endswith('= "float"')]
    assert lines == [f'"{one}" = "float"' for one in told]


ENDS = ("", "amp.deactivate()", "1 / 0", "__import__('os')._exit(0)")


@pytest.mark.parametrize("last", nightly_but(ENDS[2:], ENDS))
def test_values_near_the_limits_are_counted_whatever_ends_the_script(last: str) -> None:
    result = called("diagnose", value="75", last=last)
    assert "Nothing overflowed in 8 steps.\n" in result.output  # the script's own end
    # the scores, of 4 rows with each other
    assert "  `1`: 16 of 160 values above 32752" in result.output


def test_diagnose_says_that_nothing_overflowed() -> None:
    result = called("diagnose", "--steps", "4")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Nothing overflowed in 4 steps.{diagnose._ENDED}\n")


def test_diagnose_shows_what_it_found_before_the_script_failed() -> None:
    last = "amp.deactivate(); train(); 1 / 0"
    result = called("diagnose", "--opt-level", "O2", value="300", last=last)
    assert result.exit_code == 1
    assert "16 of 16 steps overflowed." in result.output
    assert "\n8 of 16, first in step 1: " in result.output
    assert "\n8 of 16, first in step 9: " in result.output
    assert re.search(
        r"ZeroDivisionError: division by zero \(train\.py, line \d+\)\n$", result.output
    )
    assert "The last lines of the script:\n" in result.output
    assert "Traceback (most recent call last):\n" in result.output


def test_stats_are_shown_and_written() -> None:
    result = called("stats", "--steps", "2", "--json", "stats.json", "--opt-level", "O2")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("stats.json").read_text())
    assert found["steps"] == 2
    calls = {(one["phase"], one["operator"], one["dtype"]): one["calls"] for one in found["calls"]}
    assert calls["forward", "addmm", "float16"] == 2 * 4
    assert "Forward: calls" in result.output
    assert f"{found['casts_avoided']} casts of" in " ".join(result.output.split())


def test_stats_of_a_script_that_steps_in_another_thread_are_written() -> None:
    body = textwrap.dedent(SCRIPT.format(imported="from amp_patch import amp", last=""))
    start, loop = body.split("    for step in range(8):\n")
    loop = textwrap.indent("    for step in range(8):\n" + loop.split("\ntrain()")[0], "    ")
    end = "    t = threading.Thread(target=loop)\n    t.start(); t.join()\ntrain()\n"
    script = f"import threading\n{start}    def loop():\n{loop}\n{end}"
    Path("train.py").write_text(script)
    words = ["stats", "--steps", "3", "--json", "stats.json", "--", "train.py", "0"]
    result = CliRunner().invoke(main, words, prog_name="amp-patch")
    assert result.exit_code == 0, result.output
    assert Path("stats.json").is_file()


def test_figures_are_not_cut_at_60_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    calls = [
        {"phase": "step", "operator": "a" * 50, "dtype": dtype, "calls": 123456789}
        for dtype in ("float16", "bfloat16", "float32", "int64")
    ]
    found = {"calls": calls, "casts": [], "bulk_casts": 0}
    found |= {"casts_avoided": 0, "cache_hits": 0, "half_weights": 0}
    for output in (shown(found), shown(found, monkeypatch)):
        assert output.count("123456789") == 4


def shown(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch | None = None) -> str:
    import click

    if monkeypatch is not None:  # without rich
        monkeypatch.setattr(op_report.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(click.Command("x", callback=lambda: op_report.show(found)))
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "print('amp_patch')",
            "imported neither amp_patch nor apex; write from amp_patch import amp, call model, ",
        ),
        ("from amp_patch import amp", "never called amp.initialize; call model, optimizer = amp."),
        ("from apex import amp; import torch\namp.initialize(torch.nn.Linear(2, 2), enabled=False)",
         "called amp.initialize(enabled=False); leave enabled=False out"),
    ],
)  # fmt: skip
def test_a_script_that_does_not_train_is_an_error(script: str, why: str) -> None:
    Path("other.py").write_text(script)
    result = CliRunner().invoke(main, ["stats", "--", "other.py"], prog_name="amp-patch")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert why in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose"],
        ["diagnose", "--steps", "0", "--", "x.py"],
        ["diagnose", "--opt-level", "O9", "--", "x.py"],
        ["stats", "--json", "no/folder/x.json", "--", "x.py"],
        ["stats", "--", "missing.py"],
    ],
)
def test_bad_arguments_are_one_line_and_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="amp-patch")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1


def a_cause(**found: Any) -> dict[str, Any]:
    told = {"count": 1, "first_step": 1, "text": "x", "rule": {}, "fits": None, "scale": 1.0}
    return {**told, **found}


@pytest.mark.parametrize(
    ("causes", "hidden", "is_told"),
    [
        ([], [], True),
        ([{"fits": 8.0, "scale": 16.0}], [], True),
        ([{"fits": 0.0, "scale": 16.0}], [], False),
        ([], [{"text": "exp returned inf", "rule": {}}], False),
    ],
)
def test_more_steps_are_offered_where_nothing_but_the_scale_overflowed(
    causes, hidden, is_told
) -> None:
    found = a_report(was_ended=True, causes=[a_cause(**one) for one in causes], hidden=hidden)
    assert (diagnose._ENDED in diagnose.report(found, ["x"])) is is_told


def a_report(**found: Any) -> dict[str, Any]:
    nothing = {"steps": 4, "overflowed_steps": 0, "overflows": 0, "causes": []}
    nothing |= {"was_ended": False, "uncleared_steps": 0}
    empty = {"near_limits": {}, "hidden": [], "infinite_state": {}, "flushed_at": None}
    empty |= {"near_limits_of_loss": None, "buffers": []}
    return {**nothing, **empty, **found}


def test_steps_of_several_losses_are_told_from_their_overflows() -> None:
    text = diagnose.report(a_report(overflows=5, overflowed_steps=3), ["x"])
    assert text.startswith("3 of 4 steps overflowed, in 5 backward passes.")


GAN = """
    import torch
    from torch import nn
    from amp_patch import amp

    torch.manual_seed(0)
    networks = [nn.Linear(4, 4) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in networks]
    networks, optimizers = amp.initialize(networks, optimizers, opt_level="O1", loss_scale=8.0)
    for step in range(5):
        for network, optimizer in zip(networks, optimizers):
            optimizer.zero_grad()
            for factor in (1.0, torch.inf if step and optimizer is optimizers[0] else 1.0):
                with amp.scale_loss(network(torch.randn(2, 4)).mean() * factor, optimizer) as loss:
                    loss.backward()
            optimizer.step()
"""


def test_steps_of_all_networks_are_counted_and_the_first_that_shows_a_cause_is_told() -> None:
    Path("gan.py").write_text(textwrap.dedent(GAN))
    words = ["diagnose", "--steps", "3", "--out", "found", "--", "gan.py"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "2 of 6 steps overflowed." in result.output
    assert "2 of 2, first in step 3: the loss" in result.output
    (cause,) = json.loads(Path("found/diagnose.json").read_text())["causes"]
    assert cause["first_step"] == 3
    assert cause["line"].startswith("gan.py:")
    assert "mean() * factor" in cause["line"]


def test_values_near_the_limits_are_told() -> None:
    counts = {"values": 100, "large": 3, "grads": 50, "flushed": 2, "subnormal": 1, "beyond": 0}
    text = diagnose.report(a_report(near_limits={"a.b": counts}), ["train.py"])
    assert "`a.b`: 3 of 100 values above 32752, 2 of 50 gradients flushed to zero" in text
    assert "comes up in float32, too" not in text


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_squares_of_gradients_that_half_cannot_hold_are_told(level: str) -> None:
    """Nothing overflows in the backward, and the weights stand still."""
    script = f"""
        import torch
        from amp_patch import amp

        models = [torch.nn.Linear(8, 2) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), eps=1e-4) for model in models]
        amp.initialize(models, optimizers, opt_level="{level}", loss_scale=1.0)
        for step in range(3):
            for model, optimizer in zip(models, optimizers):
                loss = 2e4 * model(torch.ones(4, 8)).float().mean()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.state["steps"] = step  # beside the parameters', as some of others do
    """
    Path("train.py").write_text(textwrap.dedent(script))
    result = CliRunner().invoke(main, ["diagnose", "--", "train.py"], prog_name="amp-patch")
    assert "Nothing overflowed in 6 steps." in result.output
    assert ("Inf in half precision: 36 numbers of Adam's exp_avg_sq." in result.output) is (
        level == "O3"
    )
    assert ("Take O2 or O5" in result.output) is (level == "O3")


STATISTICS = """
    import torch
    from amp_patch import amp

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    model[0].weight.data.mul_(1e3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level="O3")
    for step in range(3):
        with amp.scale_loss(model(torch.randn(16, 4)).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    {end}
"""


@pytest.mark.parametrize("end", ["", "amp.deactivate()"])
@pytest.mark.parametrize(
    ("name", "file"), [("diagnose", "found/diagnose.json"), ("stats", "found.json")]
)
def test_running_statistics_that_half_cannot_hold_are_told(name: str, file: str, end: str) -> None:
    Path("train.py").write_text(textwrap.dedent(STATISTICS.format(end=end)))
    out = ["--out", "found"] if name == "diagnose" else ["--json", file]
    result = CliRunner().invoke(main, [name, *out, "--steps", "9", "--", "train.py"])
    told = "running_var of `1` (BatchNorm1d) holds inf, in float16"
    assert f"\n  {told}\n  mend: Float16 holds no number above 65504" in result.output
    (found,) = json.loads(Path(file).read_text())["buffers"]
    assert (found["title"], found["rule"]) == (told, {"1": "float"})
    assert ('"1" = "float"' in result.output) is (name == "diagnose")


def test_what_a_script_printed_last_has_no_report_of_amps_and_no_advice_to_diagnose() -> None:
    """The report is above it; the error that ends the script advises this very command."""
    last = "amp.deactivate(); train()"
    imported = "from amp_patch import amp"
    script = textwrap.dedent(SCRIPT.format(imported=imported, last=last))
    Path("train.py").write_text(script.replace("16.0", "'dynamic', min_loss_scale=2.0**16"))
    result = CliRunner().invoke(main, ["diagnose", "--", "train.py", "300"])
    assert result.exit_code == 1
    assert result.output.count("`matmul` returned inf") == 1
    assert "FloatingPointError: gradients must become finite" in result.output
    assert "Run amp-patch diagnose" not in result.output
    assert result.output.count("See the report of amp-patch diagnose, which names the module") == 2


LOST = "above are 0 in float16"
LOSSES = {
    "cast by the level": "F.cross_entropy(model(x), y)",
    "cast by the engine": "(model(x) * torch.ones(4, 2)).sum()",
    "cast by its operator": "model(x).log_softmax(-1, dtype=torch.float32)[:, 0].mean()",
}


def diagnosed(script: str) -> str:
    Path("train.py").write_text(textwrap.dedent(script))
    return CliRunner().invoke(main, ["diagnose", "--", "train.py"], prog_name="amp-patch").output


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [1.0, "dynamic"])
def test_a_scale_too_small_for_any_gradient_is_told(scale: object, loss: str, level: str) -> None:
    # at O1 what makes them 0 is outside of the model, and at O2 inside
    output = diagnosed(
        f"""
        import torch
        import torch.nn.functional as F
        from amp_patch import amp

        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level={level!r}, loss_scale={scale})
        x, y = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
        for _ in range(2):
            loss = {LOSSES[loss]} * 1e-8
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    """.replace("=dynamic", "='dynamic'")
    )
    assert ("At a loss scale of 1 most gradients" in output) == (scale == 1.0)
    where = "the loss, outside of the model" if level == "O1" else "the model itself"
    assert (f"  {where}: 8 of 8 gradients flushed to zero" in output) == (scale == 1.0)


def test_a_scale_too_small_for_a_model_in_one_module_with_its_loss_is_told() -> None:
    output = diagnosed("""
        import torch
        from amp_patch import amp

        class Model(torch.nn.Linear):
            def forward(self, x):
                return super().forward(super().forward(x).tanh()).float().square().mean() * 1e-8

        model = Model(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0)
        with amp.scale_loss(model(torch.ones(4, 8)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    """)
    assert LOST in output


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_a_scale_that_overflows_have_lowered_is_not_told_as_too_small(is_dynamic: bool) -> None:
    cause = a_cause(where="input", scale=2.0**-13, scaling={"dynamic": is_dynamic})
    report = diagnose.report(a_report(overflows=4, causes=[cause], flushed_at=2.0**-13), ["x"])
    assert (LOST in report) != is_dynamic


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_classifier_that_is_sure_of_most_classes_loses_no_gradients(level: str) -> None:
    output = diagnosed(f"""
        import torch
        from amp_patch import amp

        model = torch.nn.Sequential(torch.nn.Linear(16, 500))
        with torch.no_grad():
            model[0].weight.zero_()[range(16), range(16)] = 30.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level={level!r})
        x = torch.eye(16)
        x[0] = 0.0  # the one that it has to learn
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(16))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    """)
    assert "of 8000 gradients flushed to zero" in output
    assert LOST not in output


def test_many_modules_near_the_limits_are_counted() -> None:
    counts = dict.fromkeys(("values", "large", "grads", "flushed", "subnormal", "beyond"), 1)
    near = {f"blocks.{number}": counts for number in range(30)}
    text = diagnose.report(a_report(near_limits=near), ["x"])
    assert "`blocks.9`" in text
    assert "`blocks.10`" not in text
    assert "and 20 modules with fewer" in text
    assert "comes up in float32, too" in text


def test_one_step_is_one_step() -> None:
    assert diagnose.report(a_report(steps=1), ["x"]) == "Nothing overflowed in 1 step."


def test_inf_that_no_gradient_shows_is_told_with_its_operator_and_the_rule() -> None:
    hidden = {"text": "Net: `a.b`: `mul` returned inf", "rule": {"a.b": "float"}}
    text = diagnose.report(a_report(hidden=[hidden]), ["x"])
    assert "No gradient overflowed in 4 steps." in text
    assert "Net: `a.b`: `mul` returned inf" in text
    assert '"a.b" = "float"' in text
    assert "float32, too" not in text


def test_what_skips_steps_is_not_told_again_as_what_no_gradient_shows() -> None:
    title = "Net: `a.b`: `exp` returned inf"
    cause = a_cause(text=f"{title}\n  of 13", rule={"a.b": "float"})
    hidden = {"text": f"{title}\n  of 14", "rule": {"a.b": "float"}}
    found = a_report(overflows=1, overflowed_steps=1, causes=[cause], hidden=[hidden])
    text = diagnose.report(found, ["x"])
    assert text.count(title) == text.count('"a.b" = "float"') == 1
    assert "no gradient shows it" not in text


def test_of_several_processes_the_one_that_overflows_is_told(monkeypatch) -> None:
    found = [a_report(overflows=number, overflowed_steps=number) for number in (0, 3, 1)]
    monkeypatch.setattr(diagnose, "observe", lambda *_: Observed(found, ""))
    result = CliRunner().invoke(main, ["diagnose", "--", "train.py"], prog_name="amp-patch")
    assert result.exit_code == 0, result.output
    assert "3 processes" in result.output
    assert "3 of 4 steps overflowed" in result.output


def test_of_ranks_that_skipped_alike_the_one_with_the_cause_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alike = {"overflows": 2, "overflowed_steps": 2}
    unknown = a_report(**alike, causes=[a_cause(where="unknown", text="not found", count=2)])
    known = a_report(**alike, causes=[a_cause(where="forward", text="the head", count=1)])
    monkeypatch.setattr(diagnose, "observe", lambda *_: Observed([unknown, known, unknown], ""))
    result = CliRunner().invoke(main, ["diagnose", "--", "train.py"], prog_name="amp-patch")
    assert "the head" in result.output
    assert "not found" not in result.output
