"""What is shown of a sweep: tables at any width, lines, plots; figures are never cut."""

from __future__ import annotations

import csv
import dataclasses
import errno
import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from rich.console import Console
from sweeps import NAN, eventful, eventful_comparison, made_run

from amp_patch.tools.sweep import figures, files, live, plots, series, tables, wording
from amp_patch.tools.sweep.comparison import compared
from amp_patch.tools.sweep.recommendation import recommend
from amp_patch.tools.sweep.settings import Settings
from amp_patch.tools.sweep.steps import Recording
from amp_patch.tools.sweep.sweep import Sweep
from amp_patch.tools.sweep.verdicts import Verdict

DOCS = Path(__file__).parents[3] / "docs" / "sweep.md"
ESCAPE = "\x1b"


def console_of(width: int, *, is_terminal: bool = False, **options) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, **options)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown_at(console: Console) -> str:
    comparison = eventful_comparison()
    tables.show(console, comparison, recommend(comparison))
    return printed(console)


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    text = shown_at(console_of(width))
    comparison = eventful_comparison()
    for row in comparison.rows:
        for name, cell in [column for group in tables.columns(comparison) for column in group]:
            words = cell(row).split() if name == "verdict" else [cell(row)]
            assert all(word in text for word in words), (row.level, name)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_wide_console_has_one_table_and_a_narrow_one_several() -> None:
    assert shown_at(console_of(140)).count("level ") == 1
    assert shown_at(console_of(60)).count("level ") == 3


def test_what_went_wrong_is_said_below_the_table() -> None:
    text = " ".join(shown_at(console_of(120)).split())
    assert "O2: deviates: its final loss is +20.0% from O0's, the tolerance is 5.0%." in text
    assert "O3: diverged at step 21: from then on the loss is NaN." in text
    assert "O4: crashed at step 7: RuntimeError: out of <memory>." in text
    assert "O5: timed out: it was stopped after 9 s." in text
    assert "O1: inf or NaN was in the gradients of fc.weight." in text
    assert "Recommended: O1. O1 is 2.00 times as fast as O0" in text


def test_a_level_that_deviates_after_many_skipped_steps_has_learned_from_fewer() -> None:
    comparison = eventful_comparison()
    deviates = Verdict("deviates", "its final loss is +20.0% from O0's")
    for skipped, is_told in ((4, False), (5, True)):
        rows = [
            dataclasses.replace(row, verdict=deviates, steps=100, skipped=skipped)
            for row in comparison.rows[1:3]
        ]
        text = "\n".join(tables.remarks(dataclasses.replace(comparison, rows=rows)))
        assert ("O1, O2: 5 of 100 steps were skipped, so it has learned" in text) is is_told


def test_levels_that_failed_alike_are_one_line() -> None:
    comparison = eventful_comparison()
    crashed = Verdict("crashed", "TypeError: Adadelta is refused. Take SGD.")
    rows = [dataclasses.replace(row, verdict=crashed) for row in comparison.rows]
    lines = tables.remarks(dataclasses.replace(comparison, rows=rows))
    assert lines[0] == "O0, O1, O2, O3, O4, O5: crashed: TypeError: Adadelta is refused. Take SGD."
    assert sum("crashed" in line for line in lines) == 1


@pytest.mark.parametrize("color", [True, False])
def test_colours_are_for_terminals_that_want_them(monkeypatch, color: bool) -> None:
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    text = shown_at(console_of(120, is_terminal=True, color_system=None if not color else "256"))
    assert (f"{ESCAPE}[3" in text) is color
    assert ESCAPE not in shown_at(console_of(120))


@pytest.mark.parametrize(
    ("steps", "last", "is_told"), [(12, 5.0, True), (12, 1.0, False), (20, 5.0, False)]
)
def test_a_level_that_deviates_behind_fewer_steps_is_told_with_them(
    steps: int, last: float, is_told: bool
) -> None:
    losses = [2.0] * (steps - 5) + [last] * 5
    runs = [made_run("O0", [2.0] * 15 + [1.0] * 5), made_run("O1", losses)]
    (told, *others) = [
        line for line in tables.remarks(compared(runs, 0.05)) if "of different steps" in line
    ] or [""]
    assert not others
    assert told.startswith("O1: it made 12 steps, and O0 20: ") is is_told


def test_ranks_that_skip_other_steps_are_told() -> None:
    run = made_run("O1")
    run.unlike_skips = [4, 9]
    lines = tables.remarks(compared([made_run("O0"), run], 0.05))
    assert any(
        line.startswith("O1: some ranks skipped steps that others made: 4, 9.") for line in lines
    )


FALLING = [2.0, 1.5, 1.0, 0.6]


@pytest.mark.parametrize(
    ("losses", "outcome", "goes_on"),
    [
        ([0.6, 0.5], "finished", True),
        ([1.0, 0.5], "crashed", True),
        ([], "no steps", True),
        ([2.1, 1.4, 1.1, 0.7], "finished", False),
        ([1.75, 0.1], "finished", False),  # nearer to a start
        ([5.0, 4.0], "finished", False),
        ([math.nan, 0.6], "finished", False),
        ([None, None], "finished", False),
        ([], "crashed", False),
    ],
)
def test_a_level_that_goes_on_from_what_another_saved_is_named(
    losses, outcome: str, goes_on: bool
) -> None:
    runs = [
        made_run("O0", FALLING),
        made_run("O4", FALLING),
        made_run("O5", losses, outcome=outcome),
    ]
    comparison = compared(runs, 0.05)
    assert comparison.continued == ["O5"] * goes_on
    lines = [line for line in tables.remarks(comparison) if "by {run} in" in line]
    assert [line.partition(":")[0] for line in lines] == ["O5"] * goes_on


def test_a_level_that_had_an_optimizers_state_goes_on_though_its_loss_does_not_show_it() -> None:
    runs = [made_run("O0", FALLING), made_run("O1", FALLING[:3])]
    words = "as early stopping does"
    assert compared(runs, 1e-6).continued == []
    assert any(words in line for line in tables.remarks(compared(runs, 1e-6)))
    runs[1].about["resumed"] = True
    assert compared(runs, 1e-6).continued == []  # of the first nothing is known
    runs[0].about["resumed"] = False
    assert compared(runs, 1e-6).continued == ["O1"]
    assert not any(words in line for line in tables.remarks(compared(runs, 1e-6)))
    runs[0].about["resumed"] = True  # each begins with what was learned before
    assert compared(runs, 1e-6).continued == []


def test_nothing_goes_on_where_nothing_has_ended() -> None:
    crashed = made_run("O0", FALLING, outcome="crashed")
    assert compared([crashed, made_run("O1", [], outcome="no steps")], 0.05).continued == []
    noisy = [made_run("O0", [1.0, 1.02, 0.92]), made_run("O1", [0.93, 1.01, 0.91])]
    assert compared(noisy, 0.05).continued == []


def test_a_loss_that_varies_from_step_to_step_is_not_said_to_go_on() -> None:
    varying = [60.0, 18.0, 95.0, 42.0, 71.0, 30.0, 84.0, 25.0, 66.0, 43.0]
    runs = [made_run("O0", varying), made_run("O1", [35.0, *varying])]
    assert compared(runs, 0.05).continued == []
    smooth = [60.0 - step for step in range(20)]
    runs = [made_run("O0", smooth), made_run("O1", [42.0, 41.0])]
    assert compared(runs, 0.05).continued == ["O1"]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([5.0, 4.0, 4.0], True),
        ([2.01, 1.5, 3.0], False),  # it began alike
        ([5.0, 1.0, 0.6], False),  # it ended alike
        ([math.nan, 1.0, 3.0], False),
    ],
)
def test_a_level_that_deviates_from_its_first_loss_on_is_told_of_random_numbers(
    losses: list[float], told: bool
) -> None:
    comparison = compared([made_run("O0", FALLING), made_run("O1", losses)], 0.05)
    lines = [line for line in tables.remarks(comparison) if "random numbers" in line]
    assert [line.partition(":")[0] for line in lines] == ["O1"] * told


def test_without_o0_no_column_compares_with_it() -> None:
    comparison = compared([made_run("O1"), made_run("O4")], 0.05)
    names = [name for group in tables.columns(comparison) for name, _ in group]
    assert "speed-up" not in names
    assert "vs O0" not in names
    assert any("O0 was not swept" in line for line in tables.remarks(comparison))


def test_markdown_has_a_line_for_each_level() -> None:
    lines = tables.as_markdown(eventful_comparison()).splitlines()
    assert len(lines) == 2 + 6
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


@pytest.mark.parametrize("seldom", [live.SELDOM, -1.0])  # -1: a line is due at each look
def test_without_a_terminal_a_run_is_two_lines(
    seldom: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SELDOM", seldom)
    console = console_of(100)
    run = made_run("O1", [2.0] * 9, number=2)
    with live.view_for(console, Settings(["x.py"], ["O0", "O1"], repeat=2)) as view:
        view.began(run)
        for _ in range(100):
            view.goes_on(run, Recording(steps=run.steps))
        view.ended(run)
    assert printed(console).splitlines() == [
        "[1/4] O1, round 2 begins",
        "  O1, round 2: 9 steps, loss 2, 100 steps/s, scale 1024, 0 skipped",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_loss_of_a_run_that_has_ended_is_that_of_its_table(is_terminal: bool) -> None:
    console = console_of(100, is_terminal=is_terminal)
    run = made_run("O1", FALLING)
    with live.view_for(console, Settings(["x.py"], ["O1"])) as view:
        view.began(run)
        view.ended(run)
    final, mean = (wording.loss(x) for x in (run.final_loss, live.running_loss(run.steps)))
    assert final != mean
    assert final in printed(console)
    assert mean not in printed(console)


@pytest.mark.parametrize("width", [60, 100])
def test_a_terminal_shows_each_level_with_loss_speed_and_scale(width: int) -> None:
    console = console_of(width, is_terminal=True)
    run = made_run("O1", [2.0] * 9, skipped={2})
    with live.view_for(console, Settings(["x.py"], ["O0", "O1"], steps=20)) as view:
        view.began(run)
        view.goes_on(run, Recording(steps=run.steps))
    assert re.search(r"O0 +.*waits", printed(console))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(console))
    assert re.search(r"O1 +runs +9/20 +2 +100 +1024 +1", plain)


@pytest.mark.parametrize("width", [32, 40, 50, 60, 80])
def test_where_there_is_no_room_columns_are_left_out_and_no_figure_is_cut(width: int) -> None:
    console = console_of(width, is_terminal=True)
    run = made_run("O1", [3.142e-06] * 20, outcome="interrupted")
    with live.view_for(console, Settings(["x.py"], ["O0", "O1"], steps=12345)) as view:
        view.goes_on(run, Recording(steps=run.steps))
        view.ended(run)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(console))
    assert "…" not in plain
    last = plain[plain.rindex("level") :]
    assert "20/12345" in last
    assert ("3.142e-06" in last) is (width > 40)
    assert ("skipped" in last) is (width > 60)
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= width


@pytest.mark.parametrize(("least", "tick"), [(0.9, None), (1e-2, "D2"), (1e-6, 1), (1e-12, 2)])
def test_the_axis_of_the_loss_has_as_many_ticks_as_there_is_room_for(least: float, tick) -> None:
    runs = [made_run("O0", [1.0 * least ** (step / 39) for step in range(40)])]
    _, figure = figures.figures(compared(runs, 0.05), runs, 0.05)["loss"]
    assert figure.layout.yaxis.dtick == tick
    (menu,) = figure.layout.updatemenus
    assert menu.buttons[1].args[0]["yaxis.dtick"] == (tick or "D2")


@pytest.fixture
def axes():
    return Figure().subplots()


def test_every_plot_gives_a_level_its_colour(axes) -> None:
    runs = series.shown_runs(eventful())
    plots.draw_loss(axes, eventful_comparison(), runs)
    labels = {line.get_label(): line for line in axes.lines}
    assert {"O0", "O1", "O2", "O3", "O4"} <= set(labels)
    assert all(same_color(labels[level].get_color(), wording.COLORS[level]) for level in labels
               if level in wording.COLORS)  # fmt: skip
    assert axes.get_xlabel() == "step"


def test_bars_are_steps_a_second_and_bytes(axes) -> None:
    plots.draw_speed(axes, eventful_comparison())
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[:3] == pytest.approx([100, 200, 250], rel=0.01)
    memory = Figure().subplots()
    plots.draw_memory(memory, eventful_comparison())
    assert [bar.get_width() for bar in memory.patches][:3] == pytest.approx([10, 10, 6])
    assert memory.get_xlabel() == "MiB"


def test_skipped_steps_are_marked_at_their_scale(axes) -> None:
    plots.draw_scale(axes, [eventful()[1]])
    marked = [line for line in axes.lines if line.get_marker() == "v"]
    assert [list(line.get_xydata().ravel()) for line in marked] == [[3, 1024, 4, 1024]]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_note_is_shown_once_beside_what_runs(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with live.view_for(console, Settings(["x.py"])) as view:
        view.note("not yet")
        view.note("not yet")
    assert console.file.getvalue().count("not yet") == 1


def test_the_report_says_beside_a_speed_that_the_level_does_not_train() -> None:
    shown = figures.figures(eventful_comparison(), eventful(), 0.05)["speed"][1]
    texts = " ".join(str(text) for text in re.findall(r"\d\.\d\dx \(\w+\)", shown.to_json()))
    assert "(diverged)" in texts
    assert "(deviates)" in texts


def test_a_loss_that_diverged_is_marked_where_it_was_finite_last(axes) -> None:
    comparison, shown = eventful_comparison(), series.shown_runs(eventful())
    (level,) = comparison.diverged
    last = series.last_finite(next(run for run in shown if run.level == level))
    assert len(last.steps) == 1
    figure = figures.figures(comparison, eventful(), 0.05)["loss"][1]
    marked = [line for line in figure.data if line.mode == "markers"]
    assert [(line.name, line.x, line.y) for line in marked] == [
        (f"{level}, diverged", tuple(last.steps), tuple(last.values))
    ]
    plots.draw_loss(axes, comparison, shown)
    crosses = [line for line in axes.lines if line.get_marker() == "X"]
    assert [tuple(line.get_xydata().ravel()) for line in crosses] == [(*last.steps, *last.values)]


def test_a_loss_that_diverged_does_not_flatten_the_differences_of_others() -> None:
    bursting = [2.0 * 10**step for step in range(20)]
    runs = [made_run("O0"), made_run("O1", [2.4, 1.2] * 10), made_run("O3", [*bursting, NAN])]
    shown = figures.figures(compared(runs, 0.05), runs, 0.05)["difference"][1]
    low, high = shown.layout.yaxis.range
    assert -0.2 < low < -0.05
    assert 0.2 < high < 0.3  # O1 is 20 % above
    every = figures.figures(compared(runs[:2], 0.05), runs[:2], 0.05)["difference"][1]
    assert every.layout.yaxis.range is None


def test_a_full_disk_does_not_keep_the_table_from_being_shown(tmp_path: Path, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_levels", no_room)
    console = console_of(80)
    settings = Settings(["train.py"], ["O0", "O1"])
    runs = [made_run(level) for level in settings.levels]
    with pytest.raises(OSError, match="No space"):
        Sweep(settings, tmp_path, ["python"], kept=runs).run(console)
    assert "Recommended: O0" in printed(console)


def test_a_loss_that_never_was_finite_has_no_mark() -> None:
    assert series.last_finite(made_run("O3", [math.nan] * 9)) == series.Curve([], [])


def test_long_curves_are_thinned_to_what_a_plot_shows() -> None:
    curve = series.losses(made_run("O0", [float(i) for i in range(50_000)]))
    thin = series.thinned(series.smoothed(curve))
    assert len(thin.steps) == series.MOST_POINTS
    assert (thin.steps[0], thin.steps[-1]) == (1, 50_000)


@given(st.integers(1, 199), st.floats(0.5, 2.0))
def test_a_run_that_ends_early_is_as_far_from_the_reference_as_its_steps_are(
    end: int, factor: float
) -> None:
    falling = [2.0 * 0.97**step for step in range(200)]
    reference = series.losses(made_run("O0", falling))
    short = [factor * loss for loss in falling[:end]]
    for ended in (short, [*short, *[math.nan] * (200 - end)]):
        away = series.difference(series.losses(made_run("O1", ended)), reference)
        shown = [value for value in away.values if not math.isnan(value)]
        assert shown == pytest.approx([factor - 1.0] * end)


def test_a_running_mean_of_a_line_is_the_line() -> None:
    curve = series.losses(made_run("O0", [float(i) for i in range(1000)]))
    means = series.smoothed(curve).values
    assert means[100:900] == pytest.approx(curve.values[100:900])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs, comparison = eventful(), eventful_comparison()
    settings = Settings(["train.py"], [run.level for run in runs])
    files.save(tmp_path, settings, "then", runs, comparison, recommend(comparison))
    files.write_levels(tmp_path, comparison)
    files.write_steps(tmp_path, runs, comparison.warm_up)
    return tmp_path


def test_the_json_is_strict_and_its_keys_are_explained(folder: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads((folder / "sweep.json").read_text(), parse_constant=refuse)
    assert [level["level"] for level in found["levels"]] == ["O0", "O1", "O2", "O3", "O4", "O5"]
    assert found["levels"][3]["final_loss"] == "nan"
    keys = {*found, *found["levels"][0], *found["runs"][0], *found["settings"]}
    explained = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
    assert not keys - explained


def test_the_tables_in_csv_have_a_line_for_each_level_and_step(folder: Path) -> None:
    levels = list(csv.DictReader(io.StringIO((folder / "levels.csv").read_text())))
    steps = list(csv.DictReader(io.StringIO((folder / "steps.csv").read_text())))
    assert [line["verdict"] for line in levels][:3] == ["ok", "ok", "deviates"]
    assert float(levels[1]["speed_up_middle"]) == pytest.approx(2)
    assert len(steps) == sum(len(run.steps) for run in eventful())
    third = next(line for line in steps if (line["level"], line["step"]) == ("O1", "3"))
    assert (third["skipped"], third["overflows"], third["loss_scale"]) == (
        "1",
        "fc.weight",
        "1024.0",
    )
    assert set(steps[0]) <= set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8")))
