"""The README: it is short, its commands are CI's, and its table is that of the committed sweep."""

import re
import subprocess
from typing import Any

import pytest
from pages import README, ROOT, START, execute, snippets, text_of

from amp_patch import amp

MOST_LINES = 200


def test_it_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES


@pytest.mark.usefixtures("amp")
def test_the_first_snippet_trains(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    heading, line, source = next(iter(snippets(README)))
    assert heading == START
    execute(README, source, line, namespace)
    printed = losses(capsys.readouterr().out)
    assert list(printed) == list(range(10))
    shown = losses(text_of(README))
    assert shown == pytest.approx({step: printed[step] for step in (8, 9)}, abs=2e-3)
    before = printed[0]
    amp.deactivate()
    execute(README, source.replace("range(10)", "range(200)"), line, namespace)
    assert namespace["loss"].item() < 0.8 * before


def losses(text: str) -> dict[int, float]:
    """Return the losses of a text by their steps: those of lines like ``step 0: loss 0.7379``."""
    found = re.findall(r"^step (\d+): loss (\d\.\d{4})$", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text_of(README), re.MULTILINE | re.DOTALL)


def test_there_are_two_commands_of_one_line_that_make_their_own_environment() -> None:
    assert len(commands()) == 2
    for command in commands():
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -e '.[")


def test_the_torch_for_cpus_comes_before_what_would_fetch_the_other() -> None:
    text = text_of(README)
    assert text.index("--torch-backend=cpu") < text.index(commands()[0])


def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    selection = re.search(r"< <\((grep .*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    run = subprocess.run(
        ["bash", "-c", selection.group(1)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == commands()[1]
    assert "pytest" in run.stdout


def test_the_torch_version_that_ci_runs_is_named() -> None:
    pinned = re.search(r"torch==([\d.]+)", (ROOT / ".ci" / "run").read_text()).group(1)
    assert f"torch {pinned}, " in text_of(README)
