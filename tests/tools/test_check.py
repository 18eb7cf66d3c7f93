"""``amp-patch check`` names each planted mistake at its line, and says nothing of what is right.

`checked/mistakes.txt` and `checked/right.txt` hold scripts, each below its heading ``### name``.
The lines of mistakes end in ``# !rule``; of all other lines nothing may be said. A line ``...``
stands for `SETUP`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_patch import amp, levels
from amp_patch.tools import command_line
from amp_patch.tools.check import calls, names, script
from amp_patch.tools.check.rules import RULES, arguments, initialization, registry
from amp_patch.tools.check.script import Finding, findings
from amp_patch.tools.check.source import Source, Unreadable
from amp_patch.tools.check.statements import Statements
from amp_patch.tools.check.trace import Trace

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# !([\w-]+)")
SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
from apex import amp
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def scripts_of(name: str) -> dict[str, str]:
    text = Path(__file__).with_name("checked").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    scripts = [re.sub(r"(?m)^\.\.\.$", SETUP.strip("\n"), script) for script in parts[2::2]]
    return dict(zip(parts[1::2], scripts, strict=True))


MISTAKES, RIGHT = scripts_of("mistakes"), scripts_of("right")


def findings_in(text: str) -> list[Finding]:
    return findings(Source(text, Path("script.py")), project=None)


def found(script: str) -> set[tuple[int, str]]:
    return {(one.line, one.rule) for one in findings_in(script)}


def marked(script: str) -> set[tuple[int, str]]:
    lines = enumerate(script.splitlines(), start=1)
    return {(number, name) for number, line in lines for name in MARK.findall(line)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_at_its_line(name: str) -> None:
    script = MISTAKES[name]
    assert marked(script)
    assert found(script) == marked(script)


def test_every_rule_has_a_mistake() -> None:
    assert {rule for script in MISTAKES.values() for _, rule in marked(script)} == set(RULES)


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_a_script_that_is_right(name: str) -> None:
    assert found(RIGHT[name]) == set()


@pytest.mark.parametrize("folder", ["examples", "tests/drop_in/programs"])
def test_nothing_is_said_of_the_scripts_of_this_repository(folder: str) -> None:
    assert checked(str(ROOT / folder)) == (0, "")


# --- the command ---


def checked(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, ["check", *arguments], prog_name="amp-patch")
    return result.exit_code, result.output


@pytest.fixture
def train_py(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(MISTAKES["a level with a zero"])
    return path


def test_what_is_found_is_said_with_its_mend_in_one_line(train_py: Path) -> None:
    assert checked(str(train_py)) == (
        1,
        f"{train_py}:7: opt-level: opt_level='01'; write opt_level='O0', 'O1', 'O2', 'O3', 'O4' or "
        "'O5', with the capital letter O\n",
    )


def test_a_folder_is_looked_through_once(train_py: Path) -> None:
    inside = train_py.parent / "a" / "b.py"
    inside.parent.mkdir()
    train_py.rename(inside)
    hidden = train_py.parent / ".venv" / "x.py"
    hidden.parent.mkdir()
    hidden.write_text(inside.read_text())
    code, output = checked(str(train_py.parent), str(inside))
    assert code == 1
    assert output.startswith(f"{inside}:7: opt-level: ")
    assert output.count("\n") == 1


def test_an_environment_in_a_folder_is_not_read(train_py: Path) -> None:
    packages = train_py.parent / "env" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    train_py.rename(packages / "train.py")
    (packages.parents[1] / "pyvenv.cfg").touch()
    assert checked(str(train_py.parent))[0] == 2
    assert checked(str(packages))[0] == 1


def test_links_that_lead_nowhere_or_around_are_passed(train_py: Path) -> None:
    for name, target in (("a.py", "no.py"), ("b.py", "b.py"), ("again", ".")):
        train_py.with_name(name).symlink_to(target)
    code, output = checked(str(train_py.parent))
    assert (code, output.count("\n")) == (1, 1)


def test_a_folder_without_scripts_is_refused(tmp_path: Path) -> None:
    code, output = checked(str(tmp_path))
    assert code == 2
    assert output.startswith("amp-patch: a folder must have Python scripts in it; got none in ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n", r"train.py:1: invalid syntax"),
        (b"x = 1\nif x:\npass\n", r"train.py:3: expected an indented block"),
        (b"x = '\xff'\n", r"train.py"),
        (b"\x00\n", r"train.py"),
        (b"# coding: nothing\n", r"train.py.*unknown encoding"),
        (b"x = " + b"(" * 300 + b")" * 300, r"train.py:1: too many nested parentheses"),
    ],
)
def test_what_is_no_python_is_one_line_and_the_rest_is_looked_at(
    train_py: Path, content: bytes, said: str
) -> None:
    other = train_py.with_name("other.py")
    train_py.rename(other)
    train_py.write_bytes(content)
    code, output = checked(str(train_py), str(other))
    assert code == 2
    first, second = output.splitlines()
    assert re.match(rf"amp-patch check: a script must be Python; got .*{said}", first)
    assert second.startswith(f"{other}:7: opt-level")


def test_a_missing_file_is_refused() -> None:
    code, output = checked("no.py")
    assert code == 2
    assert output.count("\n") == 1
    assert "no.py" in output


def test_the_rules_can_be_listed() -> None:
    code, output = checked("--list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == list(RULES)


@pytest.mark.parametrize(
    ("comment", "is_silent"),
    [
        ("# amp-patch: ignore[opt-level]", True),
        ("#amp-patch:ignore[zero-grad, opt-level]", True),
        ("# amp-patch: ignore", True),
        ("# why not  # amp-patch: ignore[opt-level] really", True),
        ("# amp-patch: ignore[zero-grad]", False),
        ("# ignore[opt-level]", False),
    ],
)
def test_a_comment_silences_a_rule_on_its_line(comment: str, is_silent: bool) -> None:
    script = MISTAKES["a level with a zero"].replace("# !opt-level", comment)
    assert bool(found(script)) != is_silent


def test_a_comment_counts_on_each_line_of_a_call_and_not_in_a_string() -> None:
    call = "net = amp.initialize(\n    net,\n    opt_level={},\n)"
    start = "from apex import amp\nimport torch\nnet = torch.nn.Linear(2, 2).half()\n"
    silent = "  # amp-patch: ignore"
    assert found(start + call.format(f"'O7',{silent}")) == {(3, "half-model")}
    assert found(start + call.format("'# amp-patch: ignore'")) == {
        (3, "half-model"),
        (6, "opt-level"),
    }


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from amp_patch.tools.command_line import main\n"
        f"try: main(['check', {str(ROOT / 'examples')!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the page of the documentation ---


def page() -> str:
    return (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


def rules_table() -> str:
    rows = [f"| `{rule.name}` | {rule.line} | {rule.mend} |" for rule in RULES.values()]
    return "\n".join(["| rule | what is wrong | the mend |", "|---|---|---|", *rows, ""])


def between_markers(text: str) -> str:
    return text.partition("<!-- rules:begin -->\n")[2].partition("<!-- rules:end -->")[0]


def test_the_page_has_all_rules() -> None:
    assert between_markers(page()) == rules_table(), "run: python tests/tools/test_check.py"


def test_the_page_shows_what_is_said_of_its_script(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = re.search(r"^```python\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL).group(1)
    Path("train.py").write_text(script)
    output = re.search(r"^```text\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL).group(1)
    assert checked("train.py") == (1, output)


def test_the_page_shows_how_a_rule_is_added(monkeypatch) -> None:
    source = re.findall(r"^```python\n(@rule.*?)^```$", page(), re.MULTILINE | re.DOTALL)[0]
    monkeypatch.setattr(registry, "RULES", added := {})
    exec(source, {"rule": registry.rule, "Trace": Trace, "Iterator": Iterator, "ast": ast})
    monkeypatch.setattr(script, "RULES", added)
    rprop = RIGHT["a closure"].replace("SGD", "Rprop")
    assert found(rprop) == {(rprop[: rprop.index("Rprop")].count("\n") + 1, "rprop")}


# --- what the rules know without importing it ---


def test_the_levels_that_scale_are_those_of_amp_patch() -> None:
    scaled = [level.name for level in levels.OPT_LEVELS.values() if level.loss_scale != 1.0]
    script = (
        "from apex import amp\namp.initialize(net, opt, opt_level='{}')\nopt.load_state_dict(x)"
    )
    said = [name for name in levels.OPT_LEVELS if found(script.format(name))]
    assert said == scaled


def test_the_arguments_are_those_of_amp_patch() -> None:
    for name, more in (("initialize", {"patch_torch_functions_type"}), ("scale_loss", set())):
        taken = set(inspect.signature(getattr(amp, name)).parameters) | more
        assert taken == arguments._TAKEN[f"amp.{name}"]


@pytest.mark.parametrize(
    "dotted",
    [
        "torch.amp.GradScaler",
        "torch.cuda.amp.GradScaler",
        "torch.autocast",
        "torch.amp.autocast",
        "torch.cuda.amp.autocast",
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.utils.clip_grad.clip_grad_value_",
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.DataParallel",
        *sorted(initialization._DIVIDING),
        *(name for name in names.DTYPES if name.rpartition(".")[2].islower()),
    ],
)
def test_what_the_rules_name_is_there(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


# --- nothing that Python can read breaks the reading ---


@pytest.mark.parametrize(
    "text",
    [
        "from apex import amp\n" + statement
        for statement in (
            "amp.initialize()",
            "amp.initialize(*a, **b)",
            "amp.scale_loss()",
            "with amp.scale_loss(): pass",
            "with amp.scale_loss(loss, ()) as (a, b): a.backward()",
            "amp.initialize(None, None, opt_level=None)",
            "amp.initialize(opt_level=[])",
            "amp.initialize(m, {}, num_losses='2')",
            "x = amp.initialize(m, o)[1]; x.step()",
            "def f(): return f()\nf()",
            "f = lambda *a, b=1, **k: f(*a, **k)\nf(1, c=2)",
            "class A(A): pass\nA().x.y[0].z()",
            "class A:\n    @property\n    def x(self): return self.x\nA().x",
            "for i in range(10**9): amp.initialize(m, o)",
            "while True: break\nelse: pass",
            "match x:\n    case {'a': 1, **rest}: amp.initialize(m, rest)\n    case _: pass",
            "try: pass\nexcept* ValueError: amp.initialize(m)",
            "a, *b, c = 1, 2\n[*d] = b\n(e := a)\nx[1:2] = e\ndel x",
            "async def f():\n    async with a as b: await c\n    async for d in e: yield d",
            "x = 10 ** 10 ** 10\ny = 'a' * 999999999999\nz = 999999999999 * 'a' + [0] * 9**9",
            "amp.scale_loss = amp.initialize\namp.scale_loss(1)",
            "x.y += {**a, 'b': [i for i in j for k in i if k]}",
            "def f():\n    global g\n    g = amp\ndef h():\n    nonlocal_ = g\nf(); h()",
            "@amp.half_function\ndef f(a, /, b=1, *, c): return a\nf(1, 2, c=3, d=4)",
            "import a.b.c, a.b as d\nfrom . import e\nfrom ..f import *\nprint(f'{a!r:>{d}}')",
            "assert amp, 'x'\nraise SystemExit from amp",
        )
    ],
)
def test_odd_scripts_are_read(text: str) -> None:
    if "except*" in text and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no except*")
    ast.parse(text)
    findings_in(text)


# --- a long script takes a time that grows as its length does ---

IN_A_FUNCTION = """
def train_{number}(args, loader, {given}):
    {made}
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        print(loss.item())
"""
MADE = """
    model = nn.Linear(8, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
""".strip()


def calls_to_find(script: str) -> int:
    """Return how many functions are called while a script is looked at."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        assert findings_in(script) == []
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("start", "given", "made", "end"),
    [
        ("", "", MADE, ""),
        ("", "", MADE, "train_{number}(args, loader)"),
        ("", "model, optimizer", "", ""),
        (MADE.replace("\n    ", "\n"), "", "", ""),
        (MADE.replace("\n    ", "\n"), "", "", "train_{number}(args, loader)"),
    ],
    ids=["each its own", "all called", "given", "one for all", "one for all, called"],
)
def test_the_time_grows_as_the_number_of_blocks(
    start: str, given: str, made: str, end: str
) -> None:
    def script(length: int) -> str:
        texts = [SETUP, start]
        for number in range(length):
            texts += [IN_A_FUNCTION.format(number=number, given=given, made=made)]
            texts += [end.format(number=number)]
        return "\n".join(texts)

    assert calls_to_find(script(80)) < 2.6 * calls_to_find(script(40))


def test_a_key_stays_short() -> None:
    lines = "\n".join("x = x + layer(x)" for _ in range(16))
    read = Statements().read(ast.parse(f"from apex import amp\n{lines}\nx.sum()"))
    assert max(len(call.result.key) for call in read.calls) < 5000


def test_functions_that_call_each_other_many_times_are_followed_to_a_limit(monkeypatch) -> None:
    monkeypatch.setattr(calls, "MOST_FUNCTIONS", 100)
    functions = [f"def f{n}(x): return f{n + 1}(x) + f{n + 1}(-x)" for n in range(9)]
    functions += ["def f9(x): return x", "f0(1)"]
    reading = Statements()
    reading.read(ast.parse("\n".join(functions)))
    assert reading.followed <= 101


def test_what_python_would_warn_of_is_not_told() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert found(MISTAKES["a level with a zero"] + "text = '\\d'\n") == {(7, "opt-level")}
    assert told == []


def test_a_deep_expression_is_refused_or_read() -> None:
    text = "from apex import amp\nx = " + "+".join(["1"] * 5000)
    with contextlib.suppress(Unreadable):
        findings_in(text)


if __name__ == "__main__":
    old = page()
    (ROOT / "docs" / "check.md").write_text(
        old.replace(between_markers(old) + "<!-- rules:end", rules_table() + "<!-- rules:end"),
        encoding="utf-8",
    )
