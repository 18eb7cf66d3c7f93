"""``amp-patch check`` follows a script into the files that it imports, and reads notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from amp_patch.tools import command_line
from amp_patch.tools.check.project import Project
from amp_patch.tools.check.script import findings

START = """
import torch
from apex import amp
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
"""
#: A loop that steps in the block, in its fourth line; right where nothing was scaled.
ENGINE = """from apex import amp
def fit(model, optimizer, data):
    with amp.scale_loss(model(data).mean(), optimizer) as scaled_loss:
        scaled_loss.backward(); optimizer.step()
"""
RIGHT_ENGINE = ENGINE.replace("; optimizer.step()", "\n    optimizer.step()")


def checked(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, ["check", *arguments], prog_name="amp-patch")
    return result.exit_code, result.output


def told(*paths: Path) -> list[str]:
    """Return the place and rule of each finding."""
    _, output = checked(*map(str, paths))
    return [line.partition("; ")[0].rpartition(": ")[0] for line in output.splitlines()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("script", "imports", "engine"),
    [
        ("train.py", "from engine import fit", "engine.py"),
        ("train.py", "from engine import fit as go; fit = go", "engine.py"),
        ("train.py", "from engine import *", "engine.py"),
        ("train.py", "import engine; fit = engine.fit", "engine.py"),
        ("train.py", "import engine as e\ndef fit(*args): e.fit(*args)", "engine.py"),
        ("train.py", "import lib.engine; fit = lib.engine.fit", "lib/engine.py"),
        ("train.py", "import lib.engine as e; fit = e.fit", "lib/engine.py"),
        ("train.py", "from lib import engine; fit = engine.fit", "lib/engine.py"),
        ("train.py", "from lib.engine import fit", "lib/engine.py"),
        ("train.py", "def fit(*args):\n    from engine import fit; fit(*args)", "engine.py"),
        ("train.py", "try:\n    from engine import fit\nexcept ImportError: raise", "engine.py"),
        ("lib/train.py", "from .engine import fit", "lib/engine.py"),
        ("lib/train.py", "from . import engine; fit = engine.fit", "lib/engine.py"),
        ("lib/tools/train.py", "from ..engine import fit", "lib/engine.py"),
        ("tools/train.py", "from lib.engine import fit", "lib/engine.py"),
        ("tools/deep/train.py", "from lib.engine import fit", "src/lib/engine.py"),
    ],
)
def test_a_mistake_in_a_file_that_is_imported_is_named_there(
    project: Path, script: str, imports: str, engine: str
) -> None:
    write(project / "pyproject.toml", "")
    train = write(project / script, f"{imports}{START}fit(model, optimizer, torch.ones(2, 8))\n")
    write(project / engine, RIGHT_ENGINE)
    assert told(train) == []
    write(project / engine, ENGINE)
    assert told(train) == [f"{engine}:4: step-in-block"]


def test_what_one_file_hands_to_another_is_seen(project: Path) -> None:
    write(project / "models.py", "import torch\ndef build(): return torch.nn.Linear(2, 2).half()\n")
    write(
        project / "state.py",
        "import torch\nclass Saver:\n    def __init__(self, model, opt):\n        self.opt = opt\n"
        "    def save(self):\n        torch.save({'optimizer': self.opt.state_dict()}, 'x.pt')\n",
    )
    train = write(
        project / "train.py",
        "import models\nfrom state import Saver"
        + START.replace("torch.nn.Linear(8, 2)", "models.build()")
        + "Saver(model, optimizer).save()\n",
    )
    assert told(train) == ["models.py:2: half-model", "state.py:6: amp-not-saved"]


def test_a_class_has_the_methods_of_a_base_in_another_file(project: Path) -> None:
    base = "class Base:\n" + "".join(f"    {line}\n" for line in ENGINE.splitlines()[1:])
    base = base.replace("fit(model", "fit(self, model")
    write(project / "base.py", f"from apex import amp\n{base}")
    train = write(
        project / "train.py",
        f"from base import Base{START}class Own(Base): pass\nOwn().fit(model, optimizer, 1)\n",
    )
    assert told(train) == ["base.py:5: step-in-block"]


def test_what_a_class_inherits_from_another_file_is_read_where_nobody_calls_it(
    project: Path,
) -> None:
    """A factory that looks for the class by its name, as in models/__init__.py of many projects."""
    write(project / "models/__init__.py", "")
    write(
        project / "models/base.py",
        "import torch\nclass Base:\n    def save(self):\n"
        "        torch.save({'optimizer': self.optimizer.state_dict()}, 'x.pt')\n"
        "    def own(self):\n        torch.save(self.optimizer.state_dict(), 'x.pt')\n",
    )
    body = START.replace("model, optimizer = amp", "model, self.optimizer = amp").splitlines()
    lines = "".join(f"        {one}\n" for one in body[3:])
    write(
        project / "models/own.py",
        f"import torch\nfrom apex import amp\nfrom .base import Base\nclass Own(Base):\n"
        f"    def __init__(self):\n{lines}    def own(self): pass\n",
    )
    assert told(project) == ["models/base.py:4: amp-not-saved"]


def test_branches_of_one_option_are_told_apart_across_files(project: Path) -> None:
    write(
        project / "options.py",
        "import argparse\ndef parse():\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--apex', action='store_true')\n    return parser.parse_args()\n",
    )
    write(
        project / "engine.py",
        "import torch\nfrom apex import amp\n"
        "def fit(model, optimizer, args):\n"
        "    scaler = None if args.apex else torch.cuda.amp.GradScaler()\n"
        "    loss = model(torch.ones(2, 8)).mean()\n"
        "    if args.apex:\n"
        "        with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "            scaled_loss.backward()\n"
        "        optimizer.step()\n"
        "    else:\n"
        "        scaler.scale(loss).backward()\n"
        "        scaler.step(optimizer)\n",
    )
    start, _, initialize = START.rpartition("model, optimizer =")
    train = write(
        project / "train.py",
        f"from engine import fit\nfrom options import parse{start}args = parse()\n"
        f"if args.apex:\n    model, optimizer ={initialize}fit(model, optimizer, args)\n",
    )
    assert told(train) == []
    text = train.read_text()
    train.write_text(text.replace("if args.apex:", "if not args.apex:"))
    assert told(train) == ["engine.py:7: scale-loss-without-initialize"]


def test_what_two_scripts_import_is_told_once_and_as_it_was_named(project: Path) -> None:
    engine = write(project / "engine.py", ENGINE)
    text = f"from engine import fit{START}fit(model, optimizer, 1)\n"
    one, two = write(project / "one.py", text), write(project / "two.py", text)
    given = project.absolute() / engine
    assert told(one, two, given) == [f"{given}:4: step-in-block"]
    assert told(project) == ["engine.py:4: step-in-block"]


def test_a_comment_in_the_imported_file_silences(project: Path) -> None:
    write(project / "engine.py", ENGINE.replace("step()", "step()  # amp-patch: ignore"))
    train = write(
        project / "train.py", f"import engine{START}engine.fit(model, optimizer, 1)  # amp-patch\n"
    )
    assert told(train) == []


def test_functions_that_a_script_does_not_call_are_not_its_own(project: Path) -> None:
    write(
        project / "engine.py", f"{ENGINE}if __name__ == '__main__':\n    fit(model, optimizer, 1)\n"
    )
    train = write(project / "train.py", f"import engine{START}")
    assert told(train) == []
    assert told(project) == ["engine.py:4: step-in-block"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("apex/amp.py", "def scale_loss(loss, optimizer): return loss\n"),
        ("torch/__init__.py", ""),
        ("engine.py", "def fit(:"),
        ("engine.py", "from train import model\nimport train, engine\ndef fit(*args): pass\n"),
        ("engine/data.txt", ""),
        ("json/data.txt", ""),
    ],
    ids=["apex", "torch", "no Python", "in a circle", "a folder", "of Python's own name"],
)
def test_what_cannot_be_followed_is_left_alone(project: Path, name: str, text: str) -> None:
    write(project / name, text)
    train = write(
        project / "train.py",
        f"import json, engine, nowhere.at_all\nfrom .... import far{START}"
        "json.dump(engine.fit(model, optimizer, 1), far)\n"
        "with amp.scale_loss(model(1), optimizer) as scaled_loss:\n"
        "    scaled_loss.backward()\n    optimizer.step()\n",
    )
    assert told(train) == ["train.py:11: step-in-block"]


def test_a_package_comes_before_a_folder_of_its_name(project: Path) -> None:
    write(project / "setup.py", "")
    write(project / "lib" / "__init__.py", ENGINE)
    write(project / "tools" / "lib" / "weights.txt", "")
    train = write(
        project / "tools" / "train.py", f"from lib import fit{START}fit(model, optimizer, 1)\n"
    )
    assert told(train) == ["lib/__init__.py:4: step-in-block"]


def test_what_is_installed_is_not_read(project: Path) -> None:
    packages = project / "lib" / "site-packages"
    write(packages / "engine.py", ENGINE)
    train = write(
        packages / "train" / "__init__.py", f"from engine import fit{START}fit(model, optimizer, 1)"
    )
    assert told(train) == []


def test_the_imports_of_each_file_are_followed_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = [Path(f"m{number}.py") for number in range(30)]
    for path in scripts:
        write(path, "\n".join(f"import {one.stem}" for one in scripts))
    found = Project(scripts)
    asked: list[tuple[Path, str]] = []

    def find(importer: Path, level: int, dotted: str) -> Path | None:
        asked.append((importer, dotted))
        return Project.find(found, importer, level, dotted)

    monkeypatch.setattr(found, "find", find)
    assert not any(found.uses_amp(found.read(one)) for one in scripts)
    assert sorted(asked) == sorted((one, other.stem) for one in scripts for other in scripts)


def test_what_a_script_imports_is_not_searched_where_it_names_amp_itself(project: Path) -> None:
    write(project / "train.py", "from apex import amp\nimport engine")
    write(project / "engine.py", "import deep")
    write(project / "deep.py", "")
    found = Project([Path("train.py")])
    script = found.read(Path("train.py"))
    assert found.uses_amp(script)
    assert found.is_started(script)
    assert [path.name for path in found._sources] == ["train.py"]


def test_a_file_that_is_not_followed_costs_no_tree(project: Path) -> None:
    write(project / "other.py", "import json")
    found = Project([Path("other.py")])
    assert findings(found.read(Path("other.py")), found) == []
    assert "tree" not in vars(found.read(Path("other.py")))


@pytest.mark.parametrize(
    "made", ["CfgNode()", "Own()"], ids=["of an installed class", "of a class of the project"]
)
def test_what_a_configuration_is_given_in_a_file_is_a_default(project: Path, made: str) -> None:
    write(
        project / "defaults.py",
        "from yacs.config import CfgNode\nclass Own(CfgNode): pass\n"
        f"_C = {made}\n_C.SOLVER = {made}\n_C.SOLVER.AMP = False\n",
    )
    write(project / "engine.py", ENGINE)
    start, _, initialize = START.rpartition("model, optimizer =")
    train = write(
        project / "train.py",
        f"from defaults import _C as cfg\nfrom engine import fit{start}cfg.merge_from_file('x')\n"
        f"if cfg.SOLVER.AMP:\n    model, optimizer ={initialize}    fit(model, optimizer, 1)\n",
    )
    assert told(train) == ["engine.py:4: step-in-block"]


# --- notebooks ---


def notebook(path: Path, *cells: str) -> Path:
    """Write a notebook: cells of code, each after one of text."""
    parts = [
        {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        for cell in cells
        for kind, text in (("markdown", "# A title: not Python"), ("code", cell))
    ]
    path.write_text(json.dumps({"cells": parts, "metadata": {}, "nbformat": 4}))
    return path


BLOCK = """with amp.scale_loss(model(torch.ones(2, 8)).mean(), optimizer) as scaled_loss:
    scaled_loss.backward()
    optimizer.step()"""


def test_a_mistake_in_a_notebook_is_named_by_cell_and_line(project: Path) -> None:
    path = notebook(project / "train.ipynb", START, "", f"# the loop\n{BLOCK}")
    assert told(path) == ["train.ipynb:cell 3:4: step-in-block"]
    assert told(project) == told(path)
    write(project / ".ipynb_checkpoints" / "train.ipynb", path.read_text())
    assert told(project) == told(path)


@pytest.mark.parametrize(
    "line",
    [
        "%matplotlib inline",
        "!pip install apex \\\n    timm",
        "files = !ls *.pt",
        "scale, files = %sx ls",
        "%time x = 1",
        "model?",
        "?model.forward",
        "torch.nn.Linear??",
        "if True:\n    !nvidia-smi\n    %env",
        "text = ('%s'\n% 1)",
        "text = ('%s'\n% 1)\n!ls",
        'text = """\n!x\n%y\nname?\n"""\n!ls \\\n\n!ls',
        "model[0]?",
        "torch.*Adam*?",
        "found = torch.nn.Linear?",
        "scale.x = !ls",
        "scale['x'] = !ls",
        "scale: list = !ls",
        "x = 1\n\x0c\ny = '\u2028'",
        "await train()",
    ],
)
def test_what_only_a_notebook_runs_is_passed_over(project: Path, line: str) -> None:
    path = notebook(project / "train.ipynb", START, f"{line}\n{BLOCK}")
    place = f"{line}\n{BLOCK}".count("\n") + 1
    assert told(path) == [f"train.ipynb:cell 2:{place}: step-in-block"]


@pytest.mark.parametrize(
    ("magic", "is_read"), [("%%time", True), ("%%capture out", True), ("%%bash", False)]
)
def test_a_cell_of_another_language_is_not_read(project: Path, magic: str, is_read: bool) -> None:
    path = notebook(project / "train.ipynb", START, f"{magic}\n!ls\n{BLOCK}")
    assert told(path) == (["train.ipynb:cell 2:5: step-in-block"] if is_read else [])


def test_an_empty_line_may_come_before_the_magic_of_a_cell(project: Path) -> None:
    path = notebook(project / "train.ipynb", START, "\n%%bash\nls -l", f"\n%%time\n{BLOCK}")
    assert told(path) == ["train.ipynb:cell 3:5: step-in-block"]


def test_a_notebook_may_have_line_ends_of_windows_and_a_mark_of_its_bytes(project: Path) -> None:
    path = notebook(project / "train.ipynb", START, f"%time x = 1\n{BLOCK}".replace("\n", "\r\n"))
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert told(path) == ["train.ipynb:cell 2:4: step-in-block"]


@pytest.mark.parametrize(
    ("metadata", "is_read"),
    [
        ({"kernelspec": {"name": "ir", "language": "R"}}, False),
        ({"language_info": {"name": "julia"}}, False),
        ({"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}}, True),
        ({"kernelspec": {"language": "python"}, "language_info": {"name": "pyspark"}}, True),
        ({"kernelspec": None}, True),
    ],
)
def test_a_notebook_of_another_language_is_not_read(
    project: Path, metadata: dict[str, Any], is_read: bool
) -> None:
    path = notebook(project / "train.ipynb", START, BLOCK if is_read else "f(x) = begin x end")
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": metadata}))
    code, output = checked(str(path))
    assert (code, bool(output)) == ((1, True) if is_read else (0, False))


def test_a_notebook_imports_the_files_beside_it(project: Path) -> None:
    write(project / "engine.py", ENGINE)
    path = notebook(project / "a.ipynb", f"import engine{START}", "engine.fit(model, optimizer, 1)")
    assert told(path) == ["engine.py:4: step-in-block"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", r"train.ipynb: no notebook of format 4 (JSONDecodeError"),
        ('{"worksheets": []}', r"train.ipynb: no notebook of format 4 (KeyError('cells'))"),
        ("[]", r"train.ipynb: no notebook of format 4 (TypeError"),
        ("[" * 100_000, r"train.ipynb: no notebook of format 4 (RecursionError"),
    ],
)
def test_what_is_no_notebook_is_one_line(project: Path, text: str, said: str) -> None:
    code, output = checked(str(write(project / "train.ipynb", text)))
    assert code == 2
    assert output.startswith(f"amp-patch check: a script must be Python; got {said}")
    assert output.count("\n") == 1


def test_a_mistake_of_syntax_is_named_by_its_cell(project: Path) -> None:
    code, output = checked(str(notebook(project / "train.ipynb", "import torch", "x = 1\nx ==")))
    assert (code, output.count("\n")) == (2, 1)
    assert "got train.ipynb:cell 2:2: invalid syntax" in output
