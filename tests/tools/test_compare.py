"""Levels are compared with fp32, by module and gradient: against float64, and on real scripts."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import signal
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked_run import ForkedRun, write_script
from hypothesis import given
from hypothesis import strategies as st
from support import examples, nightly_but
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_patch.session import session
from amp_patch.tools.command_line import main
from amp_patch.tools.compare import report, runs
from amp_patch.tools.compare.comparison import Comparison, GradientError, ModuleError, compare
from amp_patch.tools.compare.functions import FunctionWatch
from amp_patch.tools.compare.recorder import Recorder
from amp_patch.tools.compare.samples import SAMPLE, relative_error, sample
from amp_patch.tools.launch import Interrupted
from amp_patch.tools.same_random import SameRandomNumbers

NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20)


@given(NUMBERS, st.data())
@examples(1)
def test_the_error_is_that_of_float64(reference, data) -> None:
    level = data.draw(
        st.lists(st.floats(-1e4, 1e4, width=32), min_size=len(reference), max_size=len(reference))
    )
    one, other = torch.tensor(level).double(), torch.tensor(reference).double()
    norm = other.norm().item()
    expected = (one - other).norm().item() / norm if norm else float(one.norm() != 0)
    error = relative_error(torch.tensor(level), torch.tensor(reference))
    assert error == pytest.approx(expected, rel=1e-6)


def test_what_is_not_finite_in_fp32_either_is_left_out() -> None:
    inf = math.inf
    assert relative_error(torch.tensor([inf, 1.0]), torch.tensor([inf, 1.0])) == 0
    assert relative_error(torch.tensor([inf, 1.0]), torch.tensor([2.0, 1.0])) == inf


def test_a_large_tensor_is_sampled_at_the_same_places_without_the_scripts_chance() -> None:
    values = torch.arange(100_000.0)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.device("meta"):  # stands for a script's default device
        one, other = sample(values), sample(values.half())
    assert torch.equal(torch.rand(3), expected)
    assert len(one["values"]) == SAMPLE
    finite = torch.isfinite(other["values"])
    assert torch.equal(one["values"].half().float()[finite], other["values"][finite])
    assert other["nonfinite"] == int((~torch.isfinite(values.half())).sum())
    assert len(sample(values[:5])["values"]) == 5


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli((x > 1) * x.new_tensor(0.5)),
    "randn": lambda x: torch.randn(40, dtype=x.dtype),
    "multinomial": lambda x: torch.multinomial(x[0, 0].exp(), 3),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_random_numbers_are_the_same_in_every_precision(draw, half: torch.dtype) -> None:
    x = torch.linspace(0.5, 1.5, 240).reshape(1, 2, 12, 10)
    results = []
    for dtype in (torch.float32, half):
        torch.manual_seed(0)
        with SameRandomNumbers():
            results.append(draw(x.to(dtype)))
    one, other = results
    assert other.dtype is (half if one.is_floating_point() else one.dtype)
    torch.testing.assert_close(other.float(), one.float(), rtol=2e-2, atol=2e-2)


def test_random_numbers_in_float64_stay_so() -> None:
    with SameRandomNumbers():
        assert torch.rand(3, dtype=torch.float64).dtype is torch.float64


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_fused_attention_has_its_backward(half: torch.dtype) -> None:
    x = torch.linspace(0.5, 1.5, 240, dtype=half).reshape(1, 2, 12, 10).requires_grad_()
    grads = []
    for around in (contextlib.nullcontext(), SameRandomNumbers()):
        with around:
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            grads.append(torch.autograd.grad(y.float().square().sum(), x)[0])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def line(module: str, within: int, out: float, came: float = 1.0, step: int = 0, call: int = 1):
    """Return a call that a recorder would write, of one value."""
    tensors = [
        {"shape": [1], "values": torch.tensor([v]), "nonfinite": int(not math.isfinite(v))}
        for v in (came, out)
    ]
    return {"module": module, "step": step, "call": call, "within": within,
            "inputs": tensors[:1], "outputs": tensors[1:]}  # fmt: skip


def record(*calls, gradients=(), nonfinite=(), skipped=()):
    return {"calls": list(calls), "gradients": list(gradients), "nonfinite": list(nonfinite),
            "skipped": list(skipped), "functions": {}, "steps": 1, "overflows": [],
            "buffers": [], "ranks": 1, "alike": True}  # fmt: skip


def test_the_culprit_stands_above_those_who_hand_its_error_on() -> None:
    reference = record(line("a", 1, 1.0), line("b.inner", 2, 1.0), line("b", 1, 1.0),
                       line("c", 1, 1.0), line("", 0, 1.0))  # fmt: skip
    level = record(line("a", 1, 1.001), line("b.inner", 2, 1.3, 1.001), line("b", 1, 1.3, 1.001),
                   line("c", 1, 1.31, 1.3), line("", 0, 1.31))  # fmt: skip
    found = compare("O1", level, reference, None)
    assert [one.module for one in found.worst()][0] == "b.inner"
    by_name = {one.module: one for one in found.modules}
    assert by_name["b.inner"].amplification == pytest.approx(300, rel=1e-3)
    assert by_name["b"].amplification == pytest.approx(1, rel=1e-3)
    assert by_name["c"].made_here < 0.02
    assert by_name["a"].came_with == 0


def test_who_makes_an_error_of_a_rounding_stands_above_who_doubles_it() -> None:
    reference = record(line("makes", 1, 1.0), line("doubles", 1, 1.0))
    level = record(line("makes", 1, 1.05, 1.0005), line("doubles", 1, 1.11, 1.05))
    found = compare("O1", level, reference, None)
    assert [one.module for one in found.worst()] == ["makes", "doubles"]


def test_where_inf_is_made_stands_above_where_it_is_handed_on() -> None:
    inf = math.inf
    reference = record(line("a", 1, 1.0), line("b", 1, 1.0), line("c", 1, 1.0))
    level = record(line("a", 1, 1.0), line("b", 1, inf, 1.0), line("c", 1, inf, inf))
    found = compare("O1", level, reference, None)
    assert [one.module for one in found.worst()][:2] == ["b", "c"]
    assert [one.amplification for one in found.worst()][1] == 1


def test_other_calls_shapes_and_gradients_are_told_of() -> None:
    gradient = {"shape": [1], "values": torch.ones(1), "nonfinite": 0}
    wide = line("a", 0, 1.0)
    wide["outputs"][0]["shape"] = [2]
    reference = record(wide, line("only", 0, 1.0), gradients=[{"step": 0, "parameter": "w"}])
    level = record(
        line("a", 0, 1.0),
        line("a", 0, 1.0, call=2),
        gradients=[{"step": 0, "parameter": "w", "gradient": gradient}],
    )
    notes = "\n".join(compare("O1", level, reference, None).notes)
    assert "1 calls of modules at O1 only" in notes
    assert "at the reference only, the first only" in notes
    assert "shape [1], and [2] in the reference" in notes
    assert "w: a gradient at the level only" in notes


def test_an_overflow_while_the_scale_settles_hides_no_gradient() -> None:
    gradient = {"shape": [1], "values": torch.ones(1), "nonfinite": 0}
    lines = [{"step": 1, "parameter": "w", "gradient": gradient}]
    overflow = {"step": 0, "parameter": "w", "overflow": "inf"}
    level = record(gradients=[overflow, *lines], skipped=[[0, 0]])
    found = compare("O1", level, record(gradients=lines, skipped=[[0, 0]]), None)
    assert [(one.at_step, one.error) for one in found.gradients] == [(2, 0.0)]
    assert "1 step was skipped" in found.notes[0]


def test_noise_is_how_far_fp32_is_from_itself() -> None:
    reference, again = record(line("a", 0, 1.0)), record(line("a", 0, 1.25))
    (one,) = compare("O1", record(line("a", 0, 1.5)), reference, again).modules
    assert (one.error, one.noise) == (0.5, 0.25)


@pytest.mark.parametrize("width", [60, 100])
def test_a_table_fits_and_cuts_no_figure(width: int) -> None:
    name = "encoder.layers.11.attention.self.query.with.a.very.long.name.indeed"
    errors = [ModuleError(name, 100, 8, 1.234e-05, 5.678e-06, 12345.6, 1.0)]
    gradients = [GradientError(name + ".weight", 100, 9.87e-03)]
    found = Comparison("O1", errors, gradients, [], [], {})
    lines = list(report.lines(found, 100, width))
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert all(
        figure in text for figure in ("100.8", "1.23e-05", "5.68e-06", "1.23e+04", "9.87e-03")
    )


@pytest.fixture
def script(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(runs, "ScriptRun", ForkedRun)

    return lambda amp="amp_patch": write_script(tmp_path, amp)


def overflow(where: str, **more: object) -> dict[str, object]:
    return {"where": where, "module": "a", "operator": "linear", "title": f"Net: `a` {where}",
            "scale": 65536.0, "fits": None, "zero_eps": None, "advice": "", **more}  # fmt: skip


def test_overflows_of_the_backward_are_told_and_those_of_the_forward_only_once() -> None:
    level = record(nonfinite=[("a", "mul")])
    level["overflows"] = [overflow("forward"), overflow("backward"), overflow("loss", fits=1024.0)]
    found = compare("O1", level, record(), None)
    text = "\n".join(report.lines(found, 1, 80))
    assert text.count("Net: `a` ") == 2
    assert "Net: `a` backward.\n" in text
    assert "Net: `a` loss: of the loss scale 65536 alone, 1024 fits.\n" in text
    content = report.as_json([found], 1, 0, {})
    assert content["levels"]["O1"]["overflows"] == level["overflows"]


def spoiled(module: str) -> dict[str, object]:
    return {"module": module, "name": "running_var", "title": f"running_var of `{module}`",
            "advice": "Take O5."}  # fmt: skip


def test_buffers_that_only_the_level_makes_infinite_are_told() -> None:
    level, other, reference = record(), record(), record()
    level["buffers"], other["buffers"] = [spoiled("a"), spoiled("b")], [spoiled("a"), spoiled("c")]
    reference["buffers"] = [spoiled("b")]
    found = compare("O3", runs.together([level, other]), reference, None)
    text = "\n".join(report.lines(found, 1, 80))
    assert "  running_var of `a`\n  running_var of `c`\n  mend: Take O5.\n" in text
    content = report.as_json([found], 1, 0, {})
    assert content["levels"]["O3"]["buffers"] == [spoiled("a"), spoiled("c")]


def test_of_several_ranks_the_first_is_compared_and_overflows_are_of_all() -> None:
    gradient = {"step": 0, "parameter": "w", "overflow": "inf"}
    first = record(line("a", 0, 1.0), nonfinite=[["a", "mul"]], gradients=[gradient])
    other = record(line("a", 0, 9.0), nonfinite=[["a", "mul"], ["b", "exp"]], skipped=[[0, 0]],
                   gradients=[gradient, {**gradient, "parameter": "v"}])  # fmt: skip
    other["overflows"] = [overflow("backward")]
    found = runs.together([first, other])
    assert found["calls"] == first["calls"]
    assert found["nonfinite"] == [["a", "mul"], ["b", "exp"]]
    assert [one["parameter"] for one in found["gradients"]] == ["w", "v"]
    notes = " ".join(compare("O1", found, record(line("a", 0, 1.0)), None).notes)
    assert "of 2 processes the first is compared" in notes
    assert "some skipped steps that others made" in notes
    assert found["overflows"] == [overflow("backward")]
    alike = compare("O1", runs.together([first, first]), first, None).notes
    assert not any("others made" in note for note in alike)


@pytest.mark.parametrize(
    ("made", "compared", "failures"),
    [
        (1, [], {"O1": "interrupted"}),
        (2, ["O1"], {}),
        (3, ["O1"], {"O4": "interrupted"}),
        (4, ["O1", "O4"], {}),
    ],
)
def test_what_is_compared_when_it_is_interrupted_is_kept(
    tmp_path: Path, monkeypatch, made: int, compared: list[str], failures: dict[str, str]
) -> None:
    """The runs are O1, O0, O0, O4: the second of O0 is for the noise only, and O4 needs no more."""
    told: list[str] = []

    def recorded(command, folder, level, **options):
        if len(told) == made:
            raise Interrupted(signal.SIGTERM)
        told.append(level)
        return {**record(line("a", 0, 1.0)), "error": None}

    monkeypatch.setattr(runs, "record", recorded)
    arguments = ["compare", "--levels", "O1,O4", "--out", str(tmp_path), "--", __file__]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == (143 if made < 4 else 0), result.output
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["failures"] == failures
    assert list(found["levels"]) == compared


def test_words_name_the_level_and_the_run(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []

    def recorded(command, folder, level, **options):
        commands.append(command[-2:])
        return {**record(line("a", 0, 1.0)), "error": None}

    monkeypatch.setattr(runs, "record", recorded)
    CliRunner().invoke(main, ["compare", "--", __file__, "{level}", "x/{run}"])
    assert commands == [["O1", "x/O1"], ["O0", "x/reference-1-1"], ["O0", "x/reference-1-2"]]


BACKWARD = """
    import torch
    from amp_patch import amp

    class Grows(torch.nn.Module):
        def forward(self, x):  # its gradient is 1e10 times that of what follows
            return (x * 1e-5 - (x * 1e-5).detach()) * 1e5 * 1e5 * 1e5 + x

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), Grows(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in range(40):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(4, 4)).float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
"""


@pytest.mark.slow(instead="operators whose forward overflows")
def test_the_operator_is_named_whose_backward_overflows(script, tmp_path: Path) -> None:
    path = tmp_path / "backward.py"
    path.write_text(textwrap.dedent(BACKWARD))
    command = ["compare", "--levels", "O1", "--out", str(tmp_path), "--", str(path)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "Sequential: `1`: the backward of `mul` returned" in result.output
    content = json.loads((tmp_path / "compare.json").read_text())
    noted = content["levels"]["O1"]["overflows"][0]
    assert noted.keys() == overflow("backward").keys()
    assert noted["advice"].startswith("Compute the model in ")
    assert "makes inf or NaN of finite values" not in result.output


def test_what_has_no_values_is_not_looked_at(amp) -> None:
    """At O1 the weights of an LSTM are asked for their layout as tensors without values."""
    watch = FunctionWatch(lambda: (0, "rnn"))
    rnn = amp.initialize(torch.nn.LSTM(4, 4), opt_level="O1", verbosity=0)
    with watch:
        torch.sin(torch.ones(2, device="meta"))
        rnn(torch.randn(3, 1, 4))
    assert "sin" not in watch.table(False)["rnn"]
    assert "lstm" in watch.table(False)["rnn"]


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Let torch fill with NaN what it would leave as the memory is."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_is_nan")
def test_memory_that_nobody_has_written_to_is_no_mistake() -> None:
    x = torch.ones(3)
    with FunctionWatch(lambda: (0, "layer")) as watch:
        for made in (
            torch.empty(3),
            torch.empty_like(x),
            x.new_empty(3),
            torch.empty_strided((3,), (1,)),
        ):
            assert made.isnan().all()
        x.div(0.0)
    assert watch.left_the_range(several=False) == [["layer", "div"]]


def test_a_checkpoint_counts_nothing_that_the_watch_saves() -> None:
    inputs = torch.randn(2, 3, requires_grad=True)
    with FunctionWatch(lambda: (0, "layer")):
        checkpoint(lambda x: x.exp().sin(), inputs, use_reentrant=False).sum().backward()
    expected = inputs.detach().exp().cos() * inputs.detach().exp()
    torch.testing.assert_close(inputs.grad, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_second_run_of_a_checkpoint_is_no_further_call(
    amp, tmp_path: Path, use_reentrant: bool
) -> None:
    recorder = Recorder(session, None, [], tmp_path)
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    model.register_forward_pre_hook(recorder._enter)
    model.register_forward_hook(recorder._leave, always_call=True)
    inputs = torch.ones(1, 2, requires_grad=True)
    checkpoint(model, inputs, use_reentrant=use_reentrant).sum().backward()
    assert model.weight.grad is not None
    assert [line["call"] for line in recorder._calls] == [1]


def test_models_are_told_apart_that_end_before_the_script(amp, tmp_path: Path) -> None:
    recorder = Recorder(session, None, [], tmp_path)
    detach = session.observers.attach(recorder)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    amp.initialize(models, optimizer, opt_level="O1", verbosity=0)
    for model in models:
        recorder._enter(model, ())
        recorder._leave(model, (), torch.ones(2))
    detach()
    del models, model, optimizer
    gc.collect()
    recorder.save()
    calls = torch.load(tmp_path / "record-rank0.pt")["calls"]
    assert [one["module"] for one in calls] == ["0:", "1:"]


@pytest.mark.parametrize(
    "case", nightly_but([("apex", "O1")], [("amp_patch", "O2"), ("apex", "O1")]), ids="-".join
)
def test_a_script_is_compared(script, tmp_path: Path, case: tuple[str, str]) -> None:
    amp, level = case
    out = tmp_path / "out"
    arguments = ["compare", "--levels", f"O0,{level}", "--out", str(out), "--", script(amp)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "2: mul makes inf or NaN of finite values." in result.output
    found = json.loads((out / "compare.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "compare.txt"]
    modules = found["levels"][level]["modules"]
    assert (modules[0]["module"], modules[0]["error"]) == ("2", None)
    assert found["levels"][level]["nonfinite"][0] == {"module": "2", "function": "mul"}
    healthy = [one for one in modules if one["module"] in ("0", "1")]
    # The same values are dropped out and the same steps skipped: what is left is rounding.
    assert len(healthy) > 10
    assert 0 < max(one["error"] for one in healthy) < 1e-3
    assert {one["noise"] for one in healthy} == {0}


def test_a_script_that_fails_later_is_compared_to_there_and_ends_with_1(
    script,
) -> None:
    path = Path(script())
    text = path.read_text()
    assert "range(40)" in text
    path.write_text(text.replace("range(40)", "range(4)") + "\nraise SystemExit(3)\n")
    result = CliRunner().invoke(main, ["compare", "--steps", "1000", "--", str(path)])
    assert "O1 was not compared to its end: it ended early: exit code 3" in result.output
    assert result.exit_code == 1


def test_a_script_without_a_model_says_so(script, tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("from amp_patch import amp\nprint('nothing')\n1 / 0")
    result = CliRunner().invoke(main, ["compare", "--", str(path)])
    assert result.exit_code == 1
    assert "O1 was not compared: ZeroDivisionError: division by zero" in result.output
    assert "The last lines of the script:\nnothing\n" in result.output


@pytest.mark.parametrize("steps", [[0], [0, 0], [0, 1]])
@pytest.mark.parametrize("error", [None, "exit code 3"])
def test_a_script_that_came_to_its_end_without_a_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int], error: str | None
) -> None:
    """A script that failed in its first backward is compared to there."""

    def started(command: list[str], tool: str, options: dict, *_: object) -> types.SimpleNamespace:
        folder = Path(options["out"])
        (folder / "amp-0.jsonl").write_text('{"amp": "yes"}\n')
        for rank, made in enumerate(steps):
            saved = {**record(line("0", 0, 1.0)), "steps": made}
            torch.save(saved, folder / f"record-rank{rank}.pt")
        return types.SimpleNamespace(log=folder / "log.txt")

    monkeypatch.setattr(runs, "ScriptRun", started)
    monkeypatch.setattr(runs, "run_to_end", lambda run, timeout: error)
    result = CliRunner().invoke(main, ["compare", "--", __file__])
    is_refused = error is None and not any(steps)
    assert ("O1 was not compared: the script stepped no optimizer" in result.output) == is_refused
    assert ("O1 against O0" in result.output) == (not is_refused)
    assert result.exit_code == (1 if is_refused or error else 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare"],
        ["compare", "--", "missing.py"],
        ["compare", "--levels", "O9", "--", sys.argv[0]],
        ["compare", "--steps", "0", "--", "x"],
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="amp-patch")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1


def test_a_gradient_that_is_rounding_only_is_no_error() -> None:
    def gradient(name: str, value: float) -> dict:
        tensor = {"shape": [1], "values": torch.tensor([value]), "nonfinite": 0}
        return {"parameter": name, "step": 0, "gradient": tensor}

    usual = [gradient(f"layer{number}.weight", 1.0) for number in range(3)]
    reference = record(gradients=[*usual, gradient("attn.k.bias", 1e-9)])
    level = record(gradients=[*usual[:2], gradient("layer2.weight", 1.01),
                              gradient("attn.k.bias", 1e-6)])  # fmt: skip
    found = compare("O1", level, reference, None)
    assert found.gradients[0].parameter == "layer2.weight"
    by_name = {one.parameter: one.error for one in found.gradients}
    assert by_name["attn.k.bias"] == pytest.approx(1e-3, rel=1e-2)
