"""What tools import leaves the random numbers of a script alone."""

import importlib
import random
import re
import sys
from pathlib import Path

import processes
import pytest

import amp_patch
from amp_patch import tools
from amp_patch.tools import rich_parts

PACKAGE = Path(amp_patch.__file__).parent
#: Imports every module of the package, and prints which move which random numbers.
IMPORTS = """
import importlib, pkgutil, random
import numpy, torch

def states():
    numbers = numpy.random.get_state()
    return random.getstate(), (numbers[1].tolist(), *numbers[2:]), torch.get_rng_state().tolist()

import amp_patch
before, count = states(), 0
for found in pkgutil.walk_packages(amp_patch.__path__, "amp_patch."):
    if ".packages." not in found.name and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
        after, count = states(), count + 1
        if after != before:
            print(found.name, [a == b for a, b in zip(after, before)])
        before = after
print(count > 300)
"""


def test_rich_is_imported_without_a_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, rich_parts.__name__)
    monkeypatch.setattr(tools, "rich_parts", rich_parts)  # which the import sets
    before = random.getstate()
    importlib.import_module(rich_parts.__name__)
    assert random.getstate() == before
    monkeypatch.delitem(sys.modules, "rich.style")
    importlib.import_module("rich.style")
    assert random.getstate() != before  # else all of this is for nothing
    random.setstate(before)


def test_no_other_module_imports_rich() -> None:
    imports = re.compile(r"^\s*(from|import) rich\b|import_module\(.rich\b", re.MULTILINE)
    found = [path.name for path in PACKAGE.rglob("*.py") if imports.search(path.read_text("utf-8"))]
    assert found == ["rich_parts.py"]


@pytest.mark.slow(instead="before and after rich, which draws one")
def test_no_import_of_the_package_moves_random_numbers() -> None:
    done = processes.run([sys.executable, "-c", IMPORTS], fork=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
