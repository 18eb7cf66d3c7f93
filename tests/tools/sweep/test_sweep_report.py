"""The report and the pictures; the report is opened in a browser, without network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import nightly_but
from sweeps import NAN, eventful, eventful_comparison, made_run

from amp_patch.tools.sweep import plots, report
from amp_patch.tools.sweep.comparison import compared
from amp_patch.tools.sweep.recommendation import recommend
from amp_patch.tools.sweep.settings import Settings

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    comparison = eventful_comparison()
    settings = Settings(["train.py", "--name", "<b>"], ["O0", "O1"])
    report.write(path, settings, "then", comparison, recommend(comparison), eventful())
    return path


def test_the_pictures_are_written(tmp_path: Path) -> None:
    plots.write(tmp_path, eventful_comparison(), eventful(), 0.05)
    names = {"loss.png", "speed.png", "memory.png", "loss_scale.png", "overview.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        content = (tmp_path / name).read_bytes()
        assert content.startswith(PNG)
        assert int.from_bytes(content[16:20], "big") >= 1200  # pixels wide


@pytest.mark.slow(instead="reports of runs with steps")
def test_a_report_of_runs_without_steps_is_written(tmp_path: Path) -> None:
    runs = [made_run(level, [], outcome="crashed", reason="no") for level in ("O0", "O1")]
    comparison = compared(runs, 0.05)
    plots.write(tmp_path, comparison, runs, 0.05)
    report.write(tmp_path, Settings(["x"]), "then", comparison, recommend(comparison), runs)
    assert "nothing to recommend" in (tmp_path / "report.html").read_text()


@pytest.mark.slow(instead="each such loss with one tolerance")
@pytest.mark.parametrize(
    "case",
    nightly_but(
        [(1.0, 0.05), (0.0, 0.0), (NAN, 0.05)],
        [(loss, tolerance) for loss in (1.0, 0.0, NAN) for tolerance in (0.0, 0.05)],
    ),
    ids=str,
)
def test_losses_that_are_all_the_same_are_drawn(tmp_path: Path, case: tuple[float, float]) -> None:
    loss, tolerance = case
    runs = [made_run(level, [loss] * 20) for level in ("O0", "O4")]
    comparison = compared(runs, tolerance)
    plots.write(tmp_path, comparison, runs, tolerance)
    report.write(tmp_path, Settings(["x"]), "then", comparison, recommend(comparison), runs)


def test_what_scripts_print_is_no_markup(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "out of &lt;memory&gt;" in text
    assert "out of <memory>" not in text


def test_a_cell_by_itself_says_of_which_figure_it_is(tmp_path: Path) -> None:
    runs = [made_run(level, number=number) for number in (1, 2) for level in ("O0", "O1")]
    comparison = compared(runs, 0.05)
    report.write(tmp_path, Settings(["x"]), "then", comparison, recommend(comparison), runs)
    labels = re.findall('data-label="(.*?)"', (tmp_path / "report.html").read_text())
    assert len(labels) == 2 * len(set(labels))
    assert {"speed-up spread", "memory spread", "memory vs O0", "final loss vs O0"} <= {*labels}


@pytest.mark.parametrize("width", nightly_but([390], [1000, 390]))
def test_a_browser_shows_plots_and_table_and_asks_no_network(
    folder: Path, browser: Any, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.set_default_timeout(120_000)  # of milliseconds: a machine may be busy
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((folder / "report.html").as_uri())
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 10")
    assert asked == [(folder / "report.html").as_uri()]
    assert said == []
    titles = page.locator("section h2").all_inner_texts()
    assert [title.split()[0].strip(":") for title in titles] == [
        "Loss",
        "Difference",
        "Speed",
        "Peak",
        "Loss",
    ]
    traces = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.data.length)"
    )
    assert all(count >= 5 for count in traces)
    assert page.locator("tbody tr").count() == 6
    assert "diverged at step 21" in page.locator("tbody").inner_text()
    assert page.locator(".recommendation").inner_text().startswith("Recommended: O1")
    # nothing is wider than the screen, and every plot is inside of it
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for plot in page.locator(".js-plotly-plot").all():
        box = plot.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] > 200
    page.close()
