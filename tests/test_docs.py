"""The pages: each snippet runs, tables say what the code does, and the files named exist.

``python tests/test_docs.py`` writes the tables made from the code, and from what was measured and
committed: docs/sweep.json and some of tests/benchmarks/results/.
"""

import dataclasses
import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from benchmarks import memory, norms
from benchmarks.kernel_report import Measured
from benchmarks.whole_step.candidates import BASELINE, CANDIDATES, FUSED_BASELINE
from benchmarks.whole_step.models import BERT, MODELS
from pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    between_markers,
    headings,
    run,
    snippets,
    text_of,
    write_between_markers,
)
from torch import nn

from amp_patch import amp, levels
from amp_patch.casting import rules
from amp_patch.tools import command_line
from amp_patch.tools.rich_parts import Console
from amp_patch.tools.sweep import tables
from amp_patch.tools.sweep.comparison import Comparison, Row, Spread
from amp_patch.tools.sweep.memory import LivingTensors
from amp_patch.tools.sweep.recommendation import Recommendation
from amp_patch.tools.sweep.verdicts import Verdict

ARCHITECTURE = text_of(DOCS / "architecture.md")
#: pages whose snippets more is asked of than that they run, and who asks
TESTED_BY = {
    "check.md": "tests/tools/test_check.py",
    "logging.md": "tests/debug/test_logs.py",
    "sweep.md": "tests/tools/sweep/test_sweep_command.py",
    "tune.md": "tests/tools/test_tune.py",
}
# docs/graphs.md
pytestmark = pytest.mark.usefixtures("graph_libraries_imported")
#: pages whose snippets go on from each other, from the first to the last
IN_ONE_GO = ("diagnose.md", "mistakes.md")  # in this order in each process of pytest
SNIPPETS = [
    pytest.param(page, heading, id=f"{page.name}-{heading}")
    for page in PAGES
    if page.name not in {*TESTED_BY, *IN_ONE_GO}
    for heading in headings(page)
]


@pytest.mark.parametrize(("page", "heading"), SNIPPETS)
@pytest.mark.usefixtures("amp")
def test_the_snippets_under_a_heading_run(page: Path, heading: str) -> None:
    run(page, heading)


@pytest.mark.parametrize("name", IN_ONE_GO)
@pytest.mark.usefixtures("amp")
def test_the_snippets_of_a_page_run_one_after_the_other(name: str) -> None:
    namespace = {"__name__": "__main__"}
    for _, line, source in snippets(DOCS / name):
        exec(compile("\n" * line + source, name, "exec"), namespace)


@pytest.mark.parametrize("name", TESTED_BY)
def test_the_other_snippets_have_a_test_of_their_own(name: str) -> None:
    assert f'"{name}"' in text_of(ROOT / TESTED_BY[name])


def named_files(text: str) -> list[str]:
    """Return the paths in backticks, from the root of the repository."""
    return re.findall(r"`((?:amp_patch|csrc|tests|examples|docs)/[\w./-]*)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    assert [name for name in named_files(text_of(page)) if not (ROOT / name).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return how GitHub names the headings of a page; the site takes these names, and others."""
    outside = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_there_on_github_too(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", text_of(page))
    lost = [link for link in links if link[1] not in anchors(page.parent / (link[0] or page.name))]
    assert lost == []


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_the_page_of_a_command_has_a_row_for_each_option(name: str) -> None:
    page = text_of(DOCS / f"{ {'run': 'apex', 'disable': 'enable'}.get(name, name) }.md")
    command = command_line.main.get_command(None, name)
    options = {param.opts[-1] for param in command.params if isinstance(param, click.Option)}
    rows = set(re.findall(r"^\| `(?:amp-patch \w+ )?(-[-\w]+)", page, re.MULTILINE))
    assert options <= rows
    assert rows <= options or name == "disable"


def test_every_script_that_the_first_page_names_exists() -> None:
    named = set(re.findall(r"\b(?:examples|tests|csrc)/[\w/.]+\.\w+", text_of(README)))
    assert "examples/digits.py" in named
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_the_marks_of_an_open_merge(page: Path) -> None:
    assert not re.search(r"^(<{7} |={7}$|>{7} )", text_of(page), re.MULTILINE)


def test_a_file_that_does_not_exist_is_seen() -> None:
    assert named_files("see `amp_patch/step/skip.py` and `step.skip`") == ["amp_patch/step/skip.py"]
    assert len(named_files(ARCHITECTURE)) > 25


# --- tables ---


def living_bytes() -> int:
    """Return the bytes of all tensors that live, each storage once."""
    with LivingTensors() as living:
        return living.peak


def bytes_of_a_parameter(level: str, **options: bool) -> list[int]:
    """Return those between steps, and those from the backward to the step, with AdamW."""
    before = living_bytes()
    model = nn.Linear(768, 768, bias=False)  # so large that little else counts
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for is_last in (False, True):
        with amp.scale_loss(model(torch.ones(1, 768)).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        from_backward = living_bytes() - before if is_last else 0
        optimizer.step()
        optimizer.zero_grad()
    return [round(one / 768**2) for one in (living_bytes() - before, from_backward)]


@pytest.mark.usefixtures("amp")
def test_the_bytes_of_a_parameter_are_those_of_the_tensors_that_live() -> None:
    for row in between_markers(DOCS / "pick-a-level.md", "bytes").splitlines()[3:]:
        names, *told = [cell.strip() for cell in row.strip("|").split("|")]
        for level in re.findall(r"O\d", names):
            found = bytes_of_a_parameter(level, fused_step="fused_step" in names)
            amp.deactivate()
            assert (level, found) == (level, [int(one) for one in told])


def test_every_call_is_in_the_reference() -> None:
    reference = text_of(DOCS / "api.md").partition("## amp_patch.amp\n")[2].partition("\n## ")[0]
    missing = [name for name in amp.__all__ if f"{name}(" not in reference]
    # the three other register_* calls are told in one row with register_half_function
    assert missing == [name for name in missing if name.startswith("register_")]
    assert len(missing) <= 3


@pytest.mark.parametrize("option", list(levels.OPT_LEVELS["O0"].options())[2:])
def test_the_level_table_says_what_the_levels_are(option: str) -> None:
    page = text_of(DOCS / "levels.md")
    row = re.search(rf"^\| `{option}` \|(.*)\|$", page, re.MULTILINE).group(1)
    cells = [cell.strip() for cell in row.split("|")]
    values = [level.options()[option] for level in levels.OPT_LEVELS.values()]
    assert cells == [str(value).removeprefix("torch.") for value in values]


def test_the_first_page_and_the_page_of_levels_have_the_same_table() -> None:
    rows = [
        re.findall(r"^\| `O\d` .*$", text_of(page), re.M) for page in (README, DOCS / "levels.md")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == len(levels.OPT_LEVELS)


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


def committed_sweep() -> tuple[Comparison, Recommendation]:
    sweep = json.loads(text_of(DOCS / "sweep.json"))
    comparison = Comparison(
        rows=[_row(level) for level in sweep["levels"]],
        warm_up=sweep["warm_up_steps"],
        rounds=sweep["settings"]["repeat"],
        on_cuda=sweep["machine"]["is_cuda"],
    )
    return comparison, Recommendation(**sweep["recommendation"])


def results_table() -> str:
    """Return the table of the committed sweep."""
    return tables.as_markdown(committed_sweep()[0])


def printed_sweep() -> str:
    """Return what the committed sweep printed at its end."""
    console = Console(file=io.StringIO(), width=80)
    tables.show(console, *committed_sweep())
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    # a table ends by a blank line, and begins by another
    printed = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n"))
    return f"```text\n{printed}\n```\n"


def _row(level: dict[str, Any]) -> Row:
    verdict = Verdict(level["verdict"], level["reason"], level["verdict_step"])
    figures = {field.name: level.get(field.name) for field in dataclasses.fields(Row)}
    for name, figure in figures.items():
        if isinstance(figure, dict) and set(figure) == {"low", "middle", "high"}:
            figures[name] = Spread(**figure)
    return Row(**{**figures, "verdict": verdict})


RESULTS = ROOT / "tests" / "benchmarks" / "results"


def host_rows_table(file: str) -> str:
    """Return the table of committed host times: a median of ratios, and its quartiles."""
    measured = json.loads(text_of(RESULTS / file))
    names = list(next(iter(measured["ratios"].values())))
    lines = [["host time of a step", *names], ["---"] * (1 + len(names))]
    for model, spreads in measured["ratios"].items():
        found = [spreads[name] for name in names]
        cells = [f"{one['median']:.2f} ({one['lower']:.2f}-{one['upper']:.2f})" for one in found]
        lines.append([model, *cells])
    about = measured["machine"]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where = f"one thread of {about['processor']}, torch {about['torch']}"
    return f"Measured on {about['date']}, {where}.\n\n{table}\n"


def gpu_steps_table(mode: str, *candidates: str) -> str:
    """Return what whole steps on a GPU reached, as multiples of autocast + GradScaler."""
    found = json.loads(text_of(RESULTS / "step-NVIDIA-H200.json"))
    rows = {
        (row["model"], row["candidate"]): row
        for row in found["rows"]
        if row["mode"] == mode and row["own"]
    }
    models = [name for name in MODELS if any(model == name for model, _ in rows)]
    lines = [["candidate", *models], ["---"] * (1 + len(models))]
    for candidate in candidates or CANDIDATES:
        cells = [_gpu_cell(rows.get((model, candidate))) for model in models]
        lines += [[candidate, *cells]] if any(cells) else []
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_where(found['about'])}\n\n{table}\n"


def _gpu_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    speed = row["speed"]
    spread = f"{speed['median']:.2f} ({speed['lower']:.2f}-{speed['upper']:.2f})"
    return f"{spread}, {row['ratios']['peak_bytes']:.2f}"


def gpu_optimizers_table() -> str:
    """Return how fast BERT-base trains on a GPU, by how its optimizer steps."""
    found = json.loads(text_of(RESULTS / "step-NVIDIA-H200.json"))
    speeds = {
        row["candidate"]: f"{row['ratios']['speed']:.2f}"
        for row in found["rows"]
        if (row["mode"], row["model"]) == ("eager", BERT) and row["own"]
    }
    lines = [
        "| | AdamW as torch has it | `AdamW(fused=True)` | `fused_step=True` |",
        "|---|---|---|---|",
    ]
    for name in (BASELINE, "O1", "O2", "O4", "O5"):
        kinds = (name, f"{name}, AdamW fused", f"{name} fused_step")
        if name == BASELINE:
            kinds = (name, FUSED_BASELINE, "")
        lines.append(f"| {name} | {' | '.join(speeds.get(kind, '') for kind in kinds)} |")
    return "\n".join([*lines, ""])


def gpu_kernels_table(*lists: str) -> str:
    """Return how long the operations took on a GPU, and how near they come to a copy."""
    found = json.loads(text_of(RESULTS / "NVIDIA-H200.json"))
    lines = [["operation", "ms", "GB/s", "of a copy", "ms of the host", "kernels"], ["---"] * 6]
    for name in lists:
        lines.append([f"**{name}**", *[""] * 5])
        for row in found["lists"][name]:
            operation, _, milliseconds, host, bandwidth, share, launches = Measured(**row).cells()
            lines.append([operation, milliseconds, bandwidth, share, host, launches])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_where(found['machine'])}\n\n{table}\n"


def _where(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "cupy", "driver"))
    return f"Measured on {about['date']}, one {about['device']}, {versions}."


def memory_table() -> str:
    """Return the table of the committed peaks of memory."""
    measured = json.loads(text_of(RESULTS / "memory.json"))["bytes"]
    names = [f"{ours} / {theirs}" for ours, theirs in memory.RATIOS]
    lines = [["peak of a step", "autocast fp16", *names], ["---"] * (2 + len(names))]
    for model, found in measured.items():
        ratios = [f"{found[ours] / found[theirs]:.2f}" for ours, theirs in memory.RATIOS]
        lines.append([model, f"{found['autocast fp16'] / 2**20:.0f} MiB", *ratios])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def profiles_table() -> str:
    """Return the profiles of rules, and the rules that each consists of."""
    lines = ["| profile | rules |", "|---|---|"]
    for name, found in rules.PROFILES.items():
        listed = ", ".join(f'`{function} = "{rule}"`' for function, rule in found.items())
        lines.append(f"| `{name}` | {listed} |")
    return "\n".join([*lines, ""])


def norms_table(part: str) -> str:
    """Return a part of what was committed of the profile "fast-norms"."""
    measured = json.loads(text_of(RESULTS / "norms.json"))
    heading, *lines = norms.tables(measured)[part]
    rows = [heading, ["---"] * len(heading), *lines]
    about = measured["machine"]
    where = f"one thread of {about['processor']}, torch {about['torch']}"
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"Measured on {about['date']}, {where}.\n\n{table}\n"


GENERATED = {
    "profiles": (DOCS / "rules.md", profiles_table),
    "norms-savings": (DOCS / "rules.md", partial(norms_table, "savings")),
    "norms-losses": (DOCS / "rules.md", partial(norms_table, "losses")),
    "norms-errors": (DOCS / "benchmarks.md", partial(norms_table, "errors")),
    "norms-left-out": (DOCS / "benchmarks.md", partial(norms_table, "left-out")),
    "memory": (DOCS / "benchmarks.md", memory_table),
    "gpu": (
        README,
        partial(gpu_steps_table, "eager", "O1", "O2", "O2, AdamW fused", "O2 fused_step"),
    ),
    "gpu-eager": (DOCS / "benchmarks.md", partial(gpu_steps_table, "eager")),
    "gpu-optimizers": (DOCS / "pick-a-level.md", gpu_optimizers_table),
    "gpu-graphed": (DOCS / "benchmarks.md", partial(gpu_steps_table, "graphed")),
    "gpu-kernels": (
        DOCS / "benchmarks.md",
        partial(gpu_kernels_table, "BERT-large", "logits of 16,384 rows and 30,522 classes"),
    ),
    "host-rows": (DOCS / "benchmarks.md", partial(host_rows_table, "host_rows.json")),
    "host-rows-compiled": (
        DOCS / "benchmarks.md",
        partial(host_rows_table, "host_rows_compiled.json"),
    ),
    "host-rows-architectures": (
        DOCS / "benchmarks.md",
        partial(host_rows_table, "host_rows_architectures.json"),
    ),
    "host-rows-middle": (
        DOCS / "benchmarks.md",
        partial(host_rows_table, "host_rows_middle.json"),
    ),
    "host-rows-sgd": (DOCS / "benchmarks.md", partial(host_rows_table, "host_rows_sgd.json")),
    "host-rows-adamw": (DOCS / "benchmarks.md", partial(host_rows_table, "host_rows_adamw.json")),
    "host-in-turn": (DOCS / "benchmarks.md", partial(host_rows_table, "host_in_turn.json")),
    "rules": (DOCS / "cast-rules.md", rules_table),
    "differences": (DOCS / "cast-rules.md", differences_table),
    "results": (README, results_table),
    "printed-sweep": (DOCS / "sweep.md", printed_sweep),
}


@pytest.mark.parametrize("name", GENERATED)
def test_the_tables_made_from_the_code_are_up_to_date(name: str) -> None:
    page, table = GENERATED[name]
    assert between_markers(page, name) == table(), "run: python tests/test_docs.py"


def test_the_measured_table_has_been_written() -> None:
    assert between_markers(DOCS / "benchmarks.md", "benchmarks").count("|") > 10


if __name__ == "__main__":
    for name, (page, table) in GENERATED.items():
        write_between_markers(page, name, table())
