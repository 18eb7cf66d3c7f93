"""Scripts that are sure not to use amp are refused before they run; where it is not sure, none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_patch.tools.command_line import COMMANDS, main
from amp_patch.tools.errors import BadArguments
from amp_patch.tools.untrained import MEND, reason_after, reason_in, refuse_without_amp

PLAIN = "import torch, os.path\nfrom torch.cuda import amp\nmodel.eval()\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


WITHOUT = {
    "a script": ({"train.py": PLAIN}, "train.py --epochs 1"),
    "behind torchrun": ({"train.py": PLAIN}, "torchrun --nproc_per_node 2 train.py"),
    "behind a launching module": ({"train.py": PLAIN}, "-m torch.distributed.run train.py"),
    "with a module beside it": ({"train.py": "import steps", "steps.py": PLAIN}, "train.py"),
    "elsewhere": ({"a/train.py": "from steps import go", "a/steps.py": PLAIN}, "a/train.py"),
    "a module": ({"pkg/__init__.py": "", "pkg/train.py": "from .data import x",
                  "pkg/data.py": PLAIN}, "-m pkg.train"),
    "a package": ({"pkg/__init__.py": "", "pkg/__main__.py": "import pkg.data as data",
                   "pkg/data.py": PLAIN}, "-m pkg"),
}  # fmt: skip
PERHAPS = {
    "apex": ({"train.py": "from apex import amp"}, "train.py"),
    "amp_patch": ({"train.py": "import amp_patch"}, "train.py"),
    "by a module beside it": ({"train.py": "import steps", "steps.py": "import apex"}, "train.py"),
    "by a package": ({"train.py": "from pkg.a import b", "pkg/__init__.py": "import apex",
                      "pkg/a.py": ""}, "train.py"),
    "by a submodule": ({"train.py": "from pkg import a", "pkg/__init__.py": "",
                        "pkg/a.py": "import apex"}, "train.py"),
    "by a neighbour": ({"pkg/sub/train.py": "from ..steps import go",
                        "pkg/steps.py": "import apex"}, "-m pkg.sub.train"),
    "by a module that is not there": ({"train.py": "from . import x"}, "train.py"),
    "above the top": ({"pkg/train.py": "from ....x import y"}, "-m pkg.train"),
    "by one installed": ({"train.py": "import transformers"}, "train.py"),
    "by a folder": ({"train.py": "import wandb", "wandb/log": ""}, "train.py"),
    "by a name": ({"train.py": "import importlib\nimportlib.import_module(x)"}, "train.py"),
    "by a text": ({"train.py": "exec(open('x').read())"}, "train.py"),
    "in another process": ({"train.py": "import os\nos.system('x')"}, "train.py"),
    "in one of subprocess": ({"train.py": "from subprocess import run"}, "train.py"),
    "unreadable": ({"train.py": "print 1"}, "train.py"),
    "behind a program": ({"config.py": PLAIN}, "some-program config.py"),
    "not there": ({}, "train.py"),
    "a module that is not there": ({}, "-m pkg.train"),
    "no module": ({}, "-m"),
    "a launcher alone": ({}, "torchrun"),
    "a dot": ({}, "-m ."),
}  # fmt: skip


@pytest.mark.parametrize(("files", "words"), WITHOUT.values(), ids=WITHOUT)
def test_a_script_that_uses_no_amp_is_refused(place, files: dict[str, str], words: str) -> None:
    written(files)
    with pytest.raises(BadArguments, match=r"neither.*from amp_patch import amp, call model"):
        refuse_without_amp(words.split())


def test_a_notebook_is_refused_as_what_it_is(place) -> None:
    written({"train.ipynb": "{}"})
    with pytest.raises(BadArguments, match=r"must be Python; got the notebook train.ipynb"):
        refuse_without_amp(["train.ipynb"])


@pytest.mark.parametrize(("files", "words"), PERHAPS.values(), ids=PERHAPS)
def test_what_may_use_amp_is_run(place, files: dict[str, str], words: str) -> None:
    written(files)
    refuse_without_amp(words.split())


@pytest.mark.parametrize("command", ["sweep", "compare", "tune", "stats", "diagnose"])
def test_each_command_refuses_it_in_one_line(place, command: str) -> None:
    assert command in COMMANDS
    written({"train.py": PLAIN})
    options = ["--out", "rules.toml"] if command == "tune" else []
    result = CliRunner().invoke(main, [command, *options, "--", "train.py"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "imports neither" in result.output
    assert [path.name for path in place.iterdir()] == ["train.py"]


@pytest.mark.parametrize("command", ["sweep", "compare", "tune", "stats", "diagnose"])
def test_the_usage_shows_where_the_script_stands(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"], prog_name="amp-patch")
    usage = result.output.splitlines()[0]
    assert usage == f"Usage: amp-patch {command} [OPTIONS] -- SCRIPT [ARGS]..."


def test_a_script_that_stepped_nothing_is_told_that_its_standard_input_was_empty(place) -> None:
    (place / "amp-0.jsonl").write_text('{"amp": "yes"}\n')
    assert "standard input is empty here" in reason_in(place)
    (place / "amp-0.jsonl").write_text('{"amp": "no"}\n')
    assert "standard input" not in reason_in(place)


@pytest.mark.parametrize(
    ("state", "mend"),
    [
        ("no", "the script never called amp.initialize; call model, optimizer = amp.initialize("),
        ("disabled", "leave enabled=False out"),
        ("yes", "give amp.initialize the optimizer that is stepped"),
    ],
)
def test_each_reason_has_the_mend_of_its_own(place, state: str, mend: str) -> None:
    (place / "amp-0.jsonl").write_text(f'{{"amp": "{state}"}}\n')
    assert mend in reason_in(place)
    assert (MEND in reason_in(place)) is (state == "no")


def test_a_script_that_nobody_saw_use_amp_is_told_all_that_is_to_be_written(place) -> None:
    assert f"write from amp_patch import amp, {MEND}" in reason_in(place)
    assert MEND in reason_after(10)
