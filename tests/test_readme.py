"""The README: each of its snippets runs, its commands are CI's, its tables say what the code does.

``python tests/test_readme.py`` writes the tables that are made from the code.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_patch import amp, levels
from amp_patch.casting import rules

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)
PRELUDE = "<!-- prelude -->\n"


def text() -> str:
    return README.read_text(encoding="utf-8")


def snippets() -> Iterator[tuple[str, int, str]]:
    """Yield the heading, the line number and the source of each Python block."""
    for match in FENCED.finditer(text()):
        before = text()[: match.start(1)]
        headings = HEADING.findall(before)
        yield headings[-1] if headings else "start", before.count("\n"), match.group(1)


def prelude() -> str:
    return FENCED.search(text(), text().index(PRELUDE)).group(1)


def execute(source: str, line: int, namespace: dict[str, Any]) -> None:
    """Run a block so that a traceback points to its line in the README."""
    exec(compile("\n" * line + source, str(README), "exec"), namespace)


pytestmark = pytest.mark.usefixtures("amp")


@pytest.mark.parametrize("heading", list(dict.fromkeys(heading for heading, *_ in snippets())))
def test_the_snippets_under_a_heading_run(heading: str) -> None:
    # pickling and torch.compile look the functions of a snippet up by their module's name
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if heading != "start":
        execute(prelude(), 0, namespace)
    for found, line, source in snippets():
        if found == heading:
            execute(source, line, namespace)


def test_the_first_snippet_trains() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    _, line, source = next(iter(snippets()))
    first = source.replace("range(10)", "range(1)")
    execute(first, line, namespace)
    before = namespace["loss"].item()
    amp.deactivate()
    execute(source.replace("range(10)", "range(200)"), line, namespace)
    assert namespace["loss"].item() < 0.8 * before


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL)


def test_there_are_two_commands_of_one_line_that_make_their_own_environment() -> None:
    assert len(commands()) == 2
    for command in commands():
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -e '.[")


def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    selection = re.search(r"< <\((grep .*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    run = subprocess.run(
        ["bash", "-c", selection.group(1)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == commands()[1]
    assert "pytest" in run.stdout


def test_every_script_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:examples|tests|csrc)/[\w/.]+\.\w+", text()))
    assert "examples/digits.py" in named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_every_call_is_in_the_reference() -> None:
    reference = text().partition("### Calls")[2].partition("\n### ")[0]
    missing = [name for name in amp.__all__ if f"{name}(" not in reference]
    # the three other register_* calls are told in one row with register_half_function
    assert missing == [name for name in missing if name.startswith("register_")]
    assert len(missing) <= 3


@pytest.mark.parametrize("option", list(levels.OPT_LEVELS["O0"].options())[2:])
def test_the_level_table_says_what_the_levels_are(option: str) -> None:
    row = re.search(rf"^\| `{option}` \|(.*)\|$", text(), re.MULTILINE).group(1)
    cells = [cell.strip() for cell in row.split("|")]
    values = [level.options()[option] for level in levels.OPT_LEVELS.values()]
    assert cells == [str(value).removeprefix("torch.") for value in values]


def rules_table() -> str:
    by_rule: dict[str, list[str]] = {}
    for operator, rule in sorted(rules.rules().items()):
        if not operator.startswith("_"):
            by_rule.setdefault(rule, []).append(f"`{operator}`")
    rows = [f"| *{rule}* | {' '.join(names)} |" for rule, names in sorted(by_rule.items())]
    return "\n".join(["| rule | operators |", "|---|---|", *rows, ""])


def differences_table() -> str:
    rows = [f"| `{name}` | {reason} |" for name, reason in rules.DIFFERENCES.items()]
    return "\n".join(["| operator | here |", "|---|---|", *rows, ""])


GENERATED = {"rules": rules_table, "differences": differences_table}


def between_markers(name: str) -> str:
    return re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text(), re.DOTALL).group(
        1
    )


@pytest.mark.parametrize("name", GENERATED)
def test_the_tables_made_from_the_code_are_up_to_date(name: str) -> None:
    assert between_markers(name) == GENERATED[name](), "run: python tests/test_readme.py"


@pytest.mark.parametrize("name", ["results", "benchmarks"])
def test_the_measured_tables_have_been_written(name: str) -> None:
    assert between_markers(name).count("|") > 10


def test_the_torch_version_that_ci_runs_is_named() -> None:
    pinned = re.search(r"torch==([\d.]+)", (ROOT / ".ci" / "run").read_text()).group(1)
    assert f"torch {pinned} " in text()


def write_tables() -> None:
    """Replace the generated tables in the README."""
    for name, table in GENERATED.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = text().partition(begin)
        _, _, after = rest.partition(end)
        README.write_text(before + begin + table() + end + after, encoding="utf-8")


if __name__ == "__main__":
    write_tables()
